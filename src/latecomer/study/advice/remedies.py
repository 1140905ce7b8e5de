"""What to try for each finding: strategies to compare, and settings for any of them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tomli_w

from latecomer.study.advice.facts import Facts
from latecomer.study.advice.rules import BUSY_SERVER, PROMISES_LITTLE, VERY_OLD, Finding

FLAGSHIP = "latecomer"
FEWEST, MOST = 3, 5  # strategies to suggest
IN_SHORT = "docs/strategies.md#in-short"
AT_ONCE = "docs/strategies.md#merging-at-once"
QUORUM = "docs/strategies.md#with-a-quorum"
REPAIR = "docs/studies/feddc.md#2-whole-federations"
# The learning rate at which each did best in docs/strategies.md; above it, some diverge.
# fmt: off
BEST_RATES: Mapping[float, tuple[str, ...]] = {
    0.05: ("asyncfeded",),
    0.2: ("fedbuff", "feddc-fedbuff", "robust-fedbuff", "fadas", "fedavg"),
    0.5: ("fedasync", "feddc-fedasync", "aso-fed", "ca2fl", "fedsea", "semi-async", "safa",
          "w-pred", "weighted", "feddc", "first-order"),
    1.0: ("asyn-tiers", "paflm"),
}
# fmt: on
RATES = {name: rate for rate, names in BEST_RATES.items() for name in names}
# With noise: what was measured with it, and parts that need nothing but the noised update.
PRIVATE = frozenset(
    ("dp-fedasync", "privaasyncfed", "fedbuff", "feddc", "feddc-fedbuff", "echopfl", FLAGSHIP)
)
# Least to understand, to keep and to go wrong first; for when nothing else decides.
SIMPLEST = (
    "fedasync",
    "dp-fedasync",
    "fedbuff",
    "semi-async",
    "fadas",
    "paflm",
    "ca2fl",
    "aso-fed",
    "fedsea",
    "asyn-tiers",
    "privaasyncfed",
    "feddc-fedbuff",
    "feddc",
    "echopfl",
    "ifca",
    FLAGSHIP,
)


@dataclass(frozen=True)
class Suggestion:
    """A strategy to try, its options, and why."""

    name: str
    reason: str
    see: str
    options: Mapping[str, Any] = field(default_factory=dict)
    lr: float | None = None  # None: the config's

    @property
    def table(self) -> dict[str, Any]:
        """The config's `[strategy]`."""
        return {"name": self.name, **self.options}

    @property
    def settings(self) -> list[str]:
        """For `--set`. The whole table: options of another strategy must not stay behind."""
        chosen = [f"strategy={inline(self.table)}"]
        return chosen if self.lr is None else [*chosen, f"training.lr={self.lr:g}"]


@dataclass(frozen=True)
class Change:
    """Settings to try with any strategy, and why."""

    settings: tuple[str, ...]
    reason: str
    see: str


def inline(table: Mapping[str, Any]) -> str:
    """A table as TOML on one line."""
    return "{" + tomli_w.dumps(table).strip().replace("\n", ", ") + "}"


def suggest(findings: Sequence[Finding], facts: Facts, known: Collection[str]) -> list[Suggestion]:
    """Strategies to compare, the likeliest first; one that copes with everything leads."""
    wanted = [_flagship()] if FLAGSHIP in known else []
    for finding in findings:
        remedy = STRATEGIES.get(finding.kind)
        wanted += remedy(facts) if remedy else []
    if len({each.name for each in wanted}) < FEWEST:
        wanted += _usual(facts)
    chosen: dict[str, Suggestion] = {}
    for each in wanted:
        if each.name in known and not _barred(each.name, facts):
            chosen.setdefault(each.name, each)
    return [_with_rate(each, facts) for each in list(chosen.values())[:MOST]]


def change(findings: Sequence[Finding], facts: Facts) -> list[Change]:
    """Settings that the findings ask for, whatever the strategy."""
    return [
        found
        for finding in findings
        if (remedy := SETTINGS.get(finding.kind)) and (found := remedy(facts))
    ]


def simplicity(name: str) -> int:
    """The smaller the simpler."""
    return SIMPLEST.index(name) if name in SIMPLEST else len(SIMPLEST)


def _barred(name: str, facts: Facts) -> bool:
    s = facts.scenario
    private, loaded = bool(s and s.budget), bool(s and s.server_load >= BUSY_SERVER)
    return (private and name not in PRIVATE) or (loaded and name == "ca2fl")


def _with_rate(suggestion: Suggestion, facts: Facts) -> Suggestion:
    """With the rate that the config has for it, or none above that at which it did best."""
    name = suggestion.name
    lr = facts.tuned.get(name, min(facts.lr, RATES.get(name, facts.lr)))
    return suggestion if lr == facts.lr else replace(suggestion, lr=lr)


def _flagship() -> Suggestion:
    return Suggestion(
        FLAGSHIP, "repair, clusters and buffers; each part ends where it does not pay", IN_SHORT
    )


def _usual(facts: Facts) -> list[Suggestion]:
    if facts.scenario and facts.scenario.budget:
        return _private(facts)
    return [
        _buffered(facts, "the first to try: several updates calm what one does"),
        Suggestion("fadas", "nearly indifferent to the devices' learning rate", AT_ONCE),
        Suggestion(
            "semi-async", "half of the updates and bytes of those that merge at once", QUORUM
        ),
    ]


def _size(facts: Facts) -> int:
    """Updates per commit: docs/studies/har.md has 5 for 10 devices, 10 for 23 and more."""
    return min(10, max(2, facts.devices // 2)) if facts.devices else 10


def _buffered(facts: Facts, reason: str, see: str = AT_ONCE) -> Suggestion:
    size = _size(facts)
    return Suggestion("fedbuff", reason, see, {} if size == 10 else {"size": size})


def _remembering(facts: Facts, reason: str) -> Suggestion:
    # docs/strategies.md: `server_lr` about `size` / devices; at 1 it fails with 100 of them.
    size = _size(facts)
    options = {"size": size, "server_lr": float(f"{size / max(size, facts.devices):.2g}")}
    return Suggestion("ca2fl", reason, AT_ONCE, options)


def _for_late_data(facts: Facts) -> list[Suggestion]:
    s = facts.scenario
    buffered = Suggestion(
        "feddc-fedbuff", "repairs late updates and merges at once: the soonest we measured", AT_ONCE
    )
    memory = _remembering(facts, "no inversion: everybody's last update speaks in each commit")
    if s and s.busy:
        away = "docs/studies/feddc.md#devices-that-are-away"
        stands_in = Suggestion(
            "feddc",
            "speaks for absent devices: 0.96 on their class, the next best 0.47",
            away,
            {"surrogates": True},
        )
        tiers = Suggestion("asyn-tiers", "without inversion, the only one to keep the class", away)
        return [stands_in, tiers, memory]
    repaired = Suggestion("feddc", "late updates made fresh by inversion, with epochs", REPAIR)
    if s and s.age_behind >= VERY_OLD:
        return [repaired, buffered, memory]
    balanced = Suggestion("aso-fed", "no inversion: weight by data, not by staleness", AT_ONCE)
    return [buffered, memory, balanced]


def _private(facts: Facts) -> list[Suggestion]:
    study = "docs/studies/privaasyncfed.md#1-digits"
    return [
        Suggestion("dp-fedasync", "whole models: ahead or level in six of seven settings", study),
        Suggestion(
            "privaasyncfed",
            "narrow models spare weak devices, and cost them accuracy",
            "docs/studies/privaasyncfed.md#3-what-sub-models-save-and-for-whom",
        ),
        _buffered(
            facts,
            "a buffer averages the noise of several updates (not measured by us)",
            "docs/privacy.md#choosing-settings",
        ),
    ]


def _for_worlds(facts: Facts) -> list[Suggestion]:
    return [
        Suggestion(
            "echopfl",
            "clusters that form as updates arrive: 0.94 where one model has 0.44",
            "docs/studies/echopfl.md#3-all-methods-on-three-worlds",
        ),
        Suggestion(
            "ifca",
            "as good if told enough clusters, synchronous and slow",
            "docs/studies/echopfl.md#3-all-methods-on-three-worlds",
            {"clusters": 4},
        ),
    ]


def _for_absence(facts: Facts) -> list[Suggestion]:
    return [
        _remembering(facts, "the last update of an absent device goes on to speak"),
        _buffered(facts, "waits for nobody"),
    ]


def _for_stale(facts: Facts) -> list[Suggestion]:
    return [
        _buffered(facts, "merges at once and discounts what is old"),
        Suggestion("semi-async", "epochs, and old updates in full", QUORUM),
        Suggestion("fadas", "shorter steps where a buffer holds old updates", AT_ONCE),
    ]


def _for_badly_served(facts: Facts) -> list[Suggestion]:
    return [
        Suggestion("feddc-fedbuff", "repaired updates are not discounted", AT_ONCE),
        _remembering(facts, "late and rare devices keep a full voice"),
        Suggestion("aso-fed", "weight by data, not by staleness", AT_ONCE),
    ]


def _for_speed(facts: Facts) -> list[Suggestion]:
    found = [
        _buffered(facts, "waits for nobody, and calms the fast ones"),
        _remembering(facts, "who speaks seldom is not forgotten"),
    ]
    if facts.scenario and facts.scenario.tied:
        found = [
            _remembering(facts, "slow devices, who hold classes alone, keep a full voice"),
            Suggestion(
                "aso-fed", "weight by data, not by staleness; slow ones step further", AT_ONCE
            ),
        ]
    if facts.scenario and not facts.scenario.jitter:
        found.append(
            Suggestion("fedsea", "speeds are steady: slow devices do fewer local epochs", QUORUM)
        )
    return found


def _for_skew(facts: Facts) -> list[Suggestion]:
    return [
        _buffered(facts, "a commit is made of several devices' data"),
        _remembering(facts, "the steadiest where data differ"),
    ]


def _for_bytes(facts: Facts) -> list[Suggestion]:
    return [
        Suggestion("semi-async", "half of the updates of those that merge at once", QUORUM),
        Suggestion(
            "paflm", "37% fewer bytes up: who has nothing new is silent", AT_ONCE, {"alpha": 1.0}
        ),
    ]


def _for_server(facts: Facts) -> list[Suggestion]:
    return [Suggestion("fedasync", "plain mixing does not mind a queue", "docs/studies/har.md")]


STRATEGIES: Mapping[str, Callable[[Facts], list[Suggestion]]] = {
    "budget": _private,
    "late-data": _for_late_data,
    "worlds": _for_worlds,
    "availability": _for_absence,
    "served-worse": _for_badly_served,
    "staleness": _for_stale,
    "waiting": _for_speed,
    "speed": _for_speed,
    "heterogeneity": _for_skew,
    "links": _for_bytes,
    "server": _for_server,
}


def _total_budget(facts: Facts) -> Change | None:
    found = facts.scenario.budget if facts.scenario else None
    if found is None or (
        found.spent_most <= PROMISES_LITTLE and found.allowed > found.planned_most
    ):
        return None
    tasks = f"privacy.tasks={round(found.planned_most)}"
    see = "docs/privacy.md#choosing-settings"
    if found.whole_run:
        return Change((tasks,), "noise for as many tasks as the busiest device does", see)
    sampling = () if found.poisson or found.full_batches else ('privacy.sampling="poisson"',)
    total = ('privacy.mode="whole-run"', f"privacy.epsilon={PROMISES_LITTLE}", tasks)
    return Change((*total, *sampling), "a total over the run in place of one per release", see)


def _slower(facts: Facts) -> Change | None:
    # The step of the grid in docs/strategies.md: 0.5, 0.2, 0.1.
    if facts.run is None:
        return None
    lr = float(f"{0.4 * facts.run.lr:.2g}")
    return Change((f"training.lr={lr:g}",), "the next smaller learning rate", AT_ONCE)


def _whole_models(facts: Facts) -> Change:
    return Change(
        ('submodels.level="none"',),
        "if weak devices can carry the whole network",
        "docs/studies/privaasyncfed.md#3-what-sub-models-save-and-for-whom",
    )


def _narrow_models(facts: Facts) -> Change | None:
    if facts.scenario is None or facts.scenario.narrow:
        return None
    return Change(
        ('submodels.level="declared"',),
        "only if weak devices cannot carry the whole network: it costs them accuracy",
        "docs/studies/privaasyncfed.md#3-what-sub-models-save-and-for-whom",
    )


SETTINGS: Mapping[str, Callable[[Facts], Change | None]] = {
    "budget": _total_budget,
    "divergence": _slower,
    "swings": _slower,
    "narrow": _whole_models,
    "speed": _narrow_models,
}
