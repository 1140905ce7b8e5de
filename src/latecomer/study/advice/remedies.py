"""Strategies to compare and settings to change, for each kind of finding."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tomli_w

from latecomer.study.advice.facts import Facts
from latecomer.study.advice.rules import HIGH_SERVER_LOAD, VERY_OLD_EPOCHS, WEAK_EPSILON, Finding

FLAGSHIP = "latecomer"
MIN_SUGGESTIONS, MAX_SUGGESTIONS = 3, 5
IN_SHORT = "docs/strategies.md#in-short"
ON_ARRIVAL = "docs/strategies.md#merging-on-arrival"
QUORUM = "docs/strategies.md#with-a-quorum"
COMPENSATION = "docs/studies/feddc.md#2-whole-federations"
# The best learning rate of each strategy in docs/strategies.md; above it, some diverge.
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
# Strategies for private runs: measured with noise, or using the noised updates only.
PRIVATE = frozenset(
    ("dp-fedasync", "privaasyncfed", "fedbuff", "feddc", "feddc-fedbuff", "echopfl", FLAGSHIP)
)
# From the simplest strategy to the most complex; breaks ties.
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
        """For `--set`: the whole strategy table, which replaces options of another strategy."""
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
    """At most MAX_SUGGESTIONS strategies, the default strategy first, then by finding."""
    wanted = [_flagship()] if FLAGSHIP in known else []
    for finding in findings:
        remedy = STRATEGIES.get(finding.kind)
        wanted += remedy(facts) if remedy else []
    if len({each.name for each in wanted}) < MIN_SUGGESTIONS:
        wanted += _defaults(facts)
    chosen: dict[str, Suggestion] = {}
    for each in wanted:
        if each.name in known and not _unsuitable(each.name, facts):
            chosen.setdefault(each.name, each)
    return [_with_rate(each, facts) for each in list(chosen.values())[:MAX_SUGGESTIONS]]


def change(findings: Sequence[Finding], facts: Facts) -> list[Change]:
    """Settings for the findings, independent of the strategy."""
    return [
        found
        for finding in findings
        if (remedy := SETTINGS.get(finding.kind)) and (found := remedy(facts))
    ]


def simplicity(name: str) -> int:
    """The rank of a strategy in SIMPLEST; unknown ones come last."""
    return SIMPLEST.index(name) if name in SIMPLEST else len(SIMPLEST)


def _unsuitable(name: str, facts: Facts) -> bool:
    s = facts.scenario
    private, loaded = bool(s and s.budget), bool(s and s.server_load >= HIGH_SERVER_LOAD)
    return (private and name not in PRIVATE) or (loaded and name == "ca2fl")


def _with_rate(suggestion: Suggestion, facts: Facts) -> Suggestion:
    """With the rate of `[compare.NAME]`, else the config's, at most the strategy's best rate."""
    name = suggestion.name
    lr = facts.tuned.get(name, min(facts.lr, RATES.get(name, facts.lr)))
    return suggestion if lr == facts.lr else replace(suggestion, lr=lr)


def _flagship() -> Suggestion:
    return Suggestion(
        FLAGSHIP,
        "compensation, clusters and cached updates; parts that do not help switch off",
        IN_SHORT,
    )


def _defaults(facts: Facts) -> list[Suggestion]:
    if facts.scenario and facts.scenario.budget:
        return _private(facts)
    return [
        _buffered(facts, "a good first choice: a buffer averages several updates"),
        Suggestion("fadas", "almost insensitive to the devices' learning rate", ON_ARRIVAL),
        Suggestion("semi-async", "half of the updates and bytes of merging at once", QUORUM),
    ]


def _size(facts: Facts) -> int:
    """Buffer size: docs/studies/har.md has 5 for 10 devices, 10 for 23 and more."""
    return min(10, max(2, facts.devices // 2)) if facts.devices else 10


def _buffered(facts: Facts, reason: str, see: str = ON_ARRIVAL) -> Suggestion:
    size = _size(facts)
    return Suggestion("fedbuff", reason, see, {} if size == 10 else {"size": size})


def _cached(facts: Facts, reason: str) -> Suggestion:
    # docs/strategies.md: `server_lr` about `size` / devices; at 1 it fails with 100 devices.
    size = _size(facts)
    options = {"size": size, "server_lr": float(f"{size / max(size, facts.devices):.2g}")}
    return Suggestion("ca2fl", reason, ON_ARRIVAL, options)


def _for_late_classes(facts: Facts) -> list[Suggestion]:
    s = facts.scenario
    buffered = Suggestion(
        "feddc-fedbuff", "staleness compensation with a buffer: the fastest we measured", ON_ARRIVAL
    )
    cached = _cached(facts, "no inversion: every commit uses the cached update of each device")
    if s and s.busy:
        absent = "docs/studies/feddc.md#absent-devices"
        surrogates = Suggestion(
            "feddc",
            "surrogate updates for absent devices: 0.96 late-class accuracy, the next best 0.47",
            absent,
            {"surrogates": True},
        )
        tiers = Suggestion("asyn-tiers", "the only one without inversion to keep the class", absent)
        return [surrogates, tiers, cached]
    compensated = Suggestion(
        "feddc", "staleness compensation by gradient inversion, with epochs", COMPENSATION
    )
    if s and s.straggler_age >= VERY_OLD_EPOCHS:
        return [compensated, buffered, cached]
    weighted = Suggestion("aso-fed", "no inversion: weight by data, not by staleness", ON_ARRIVAL)
    return [buffered, cached, weighted]


def _private(facts: Facts) -> list[Suggestion]:
    study = "docs/studies/privaasyncfed.md#1-digits"
    return [
        Suggestion("dp-fedasync", "whole models: best or equal in six of seven settings", study),
        Suggestion(
            "privaasyncfed",
            "sub-models save computation on weak devices, at a loss of their accuracy",
            "docs/studies/privaasyncfed.md#3-what-sub-models-save",
        ),
        _buffered(
            facts,
            "a buffer averages the noise of several updates (not measured by us)",
            "docs/privacy.md#choosing-settings",
        ),
    ]


def _for_concept_shift(facts: Facts) -> list[Suggestion]:
    return [
        Suggestion(
            "echopfl",
            "clusters formed from arriving updates: 0.94 where one model has 0.44",
            "docs/studies/echopfl.md#3-all-methods-on-three-worlds",
        ),
        Suggestion(
            "ifca",
            "as accurate if `clusters` is large enough, but synchronous and slow",
            "docs/studies/echopfl.md#3-all-methods-on-three-worlds",
            {"clusters": 4},
        ),
    ]


def _for_absence(facts: Facts) -> list[Suggestion]:
    return [
        _cached(facts, "uses the cached update of an absent device"),
        _buffered(facts, "does not wait for any device"),
    ]


def _for_staleness(facts: Facts) -> list[Suggestion]:
    return [
        _buffered(facts, "merges at once and discounts stale updates"),
        Suggestion("semi-async", "epochs, stale updates at full weight", QUORUM),
        Suggestion("fadas", "smaller steps if the buffer holds stale updates", ON_ARRIVAL),
    ]


def _for_local_accuracy(facts: Facts) -> list[Suggestion]:
    return [
        Suggestion("feddc-fedbuff", "compensated updates are not discounted", ON_ARRIVAL),
        _cached(facts, "devices with late or few updates keep their full weight"),
        Suggestion("aso-fed", "weight by data, not by staleness", ON_ARRIVAL),
    ]


def _for_speed(facts: Facts) -> list[Suggestion]:
    found = [
        _buffered(facts, "does not wait for any device, and averages the fast ones"),
        _cached(facts, "slow devices count in every commit by their cached update"),
    ]
    if facts.scenario and facts.scenario.straggler_classes:
        found = [
            _cached(facts, "stragglers that hold classes alone keep their full weight"),
            Suggestion(
                "aso-fed",
                "weight by data, not by staleness; larger steps on slow devices",
                ON_ARRIVAL,
            ),
        ]
    if facts.scenario and not facts.scenario.jitter:
        found.append(
            Suggestion("fedsea", "speeds are constant: slow devices do fewer local epochs", QUORUM)
        )
    return found


def _for_skew(facts: Facts) -> list[Suggestion]:
    return [
        _buffered(facts, "a commit averages the updates of several devices"),
        _cached(facts, "the most stable with heterogeneous data"),
    ]


def _for_bandwidth(facts: Facts) -> list[Suggestion]:
    return [
        Suggestion("semi-async", "half of the updates of merging at once", QUORUM),
        Suggestion(
            "paflm", "37% fewer bytes up: devices skip small updates", ON_ARRIVAL, {"alpha": 1.0}
        ),
    ]


def _for_server(facts: Facts) -> list[Suggestion]:
    return [Suggestion("fedasync", "model mixing tolerates a queue", "docs/studies/har.md")]


STRATEGIES: Mapping[str, Callable[[Facts], list[Suggestion]]] = {
    "budget": _private,
    "late-classes": _for_late_classes,
    "concept-shift": _for_concept_shift,
    "availability": _for_absence,
    "local-accuracy": _for_local_accuracy,
    "staleness": _for_staleness,
    "idle": _for_speed,
    "speed": _for_speed,
    "heterogeneity": _for_skew,
    "bandwidth": _for_bandwidth,
    "server": _for_server,
}


def _total_budget(facts: Facts) -> Change | None:
    found = facts.scenario.budget if facts.scenario else None
    if found is None or (found.spent_max <= WEAK_EPSILON and found.allowed > found.planned_max):
        return None
    tasks = f"privacy.tasks={round(found.planned_max)}"
    see = "docs/privacy.md#choosing-settings"
    if found.whole_run:
        return Change((tasks,), "calibrates the noise to the tasks of the busiest device", see)
    sampling = () if found.poisson or found.full_batches else ('privacy.sampling="poisson"',)
    total = ('privacy.mode="whole-run"', f"privacy.epsilon={WEAK_EPSILON}", tasks)
    return Change((*total, *sampling), "one epsilon for the whole run, not per release", see)


def _smaller_rate(facts: Facts) -> Change | None:
    # The step of the grid in docs/strategies.md: 0.5, 0.2, 0.1.
    if facts.run is None:
        return None
    lr = float(f"{0.4 * facts.run.lr:.2g}")
    return Change((f"training.lr={lr:g}",), "the next smaller learning rate", ON_ARRIVAL)


def _whole_models(facts: Facts) -> Change:
    return Change(
        ('submodels.level="none"',),
        "if weak devices can train the whole network",
        "docs/studies/privaasyncfed.md#3-what-sub-models-save",
    )


def _submodels(facts: Facts) -> Change | None:
    if facts.scenario is None or facts.scenario.narrow:
        return None
    return Change(
        ('submodels.level="declared"',),
        "only if weak devices cannot train the whole network: it lowers their accuracy",
        "docs/studies/privaasyncfed.md#3-what-sub-models-save",
    )


SETTINGS: Mapping[str, Callable[[Facts], Change | None]] = {
    "budget": _total_budget,
    "divergence": _smaller_rate,
    "oscillation": _smaller_rate,
    "sub-models": _whole_models,
    "speed": _submodels,
}
