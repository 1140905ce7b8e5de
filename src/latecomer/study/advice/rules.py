"""What the facts say, one rule each: pure functions, with thresholds from our own measurements.

A rule gives None where its facts are within bounds, or are not known. RULES is in the order in
which things dominate: by what they cost in the studies, where they were not heeded.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite

from latecomer.study.advice.facts import Facts

# Total epsilon beyond which little is promised: docs/privacy.md, "The promise".
PROMISES_LITTLE = 10.0
# Age in epochs, the device's own task included, from which repair was ahead. docs/strategies.md: at
# 4.8 to 6.6 feddc-fedbuff was the soonest; docs/studies/feddc.md, "Delays": nothing gained at 3
# (Gamma 2).
OLD = 4.0
# And from which it was clearly ahead with a quorum too: same table, 10 and 40.
VERY_OLD = 10.0
# Skew of label mixes from which lateness, or the last speaker, shows in the model.
# docs/studies/feddc.md, "Heterogeneity": nothing lost at alpha 1 (skew 0.70 to 0.76 on digits),
# much at alpha 0.1 (0.94 to 0.96).
SKEWED = 0.85
# Speeds from which waiting costs: README, four speeds 1 : 8 take fedavg four to five times as long.
# Between 1 and 8 nothing was measured; 3 is our choice.
UNEVEN = 3.0
# docs/studies/feddc.md, "Devices that are away": who is heard once in 21 epochs is not learned
# from. Part-time absence was not measured; a fifth of the time, a tenth of the devices or of the
# tasks are our choice.
AWAY, UNHEARD, LOST = 0.2, 0.1, 0.1
# Half of a task on links: docs/strategies.md, "at once or with a quorum" differ by half the bytes.
ON_LINKS = 0.5
# docs/studies/har.md: ca2fl falls apart where the server is the bottleneck.
BUSY_SERVER = 0.5
# docs/strategies.md, "its lowest after 200 s": in the second half steady ones stay within 0.02 of
# their end, those near their largest learning rate fall by 0.05 to 0.18.
SWINGS = 0.05
# Accuracy still gained in the last quarter of a run that is done: below the spread over seeds.
RISING = 0.02
# docs/strategies.md, column "late devices": 0.95 to 0.98, but 0.89 with fedasync, 0.44 with oort.
SERVED_WORSE = 0.05
# docs/gallery.md: with fedavg devices wait for three fifths of the time, else hardly.
WAITING = 0.3
# An honest run refuses next to nothing; docs/strategies.md saw "a few" near divergence.
REFUSED = 0.05
# docs/studies/echopfl.md: one model for worlds that contradict each other stays at 0.44 on the
# devices' own data; one for devices with two classes each has 0.94 and more.
FITS_NOBODY = 0.6
# Guessing, and a half more: what a diverged model has.
AT_CHANCE = 1.5
# Of all examples: who holds more is no exception.
MOST = 0.5


@dataclass(frozen=True)
class Finding:
    """One thing that matters, in words, with its numbers and where we measured it."""

    kind: str
    text: str
    evidence: Mapping[str, float]
    see: str


Rule = Callable[[Facts], Finding | None]

# fmt: off
SYNCHRONOUS = frozenset((
    "fedavg", "fedprox", "fedavgm", "fedadagrad", "fedyogi", "fedadam", "heterofl", "oort", "ifca",
    "clusterfl",
))
# fmt: on


def diverged(facts: Facts) -> Finding | None:
    run = facts.run
    if run is None or (run.accuracy > AT_CHANCE * run.chance and run.refused < REFUSED):
        return None
    why = (
        f"accuracy ended at {run.accuracy:.2f}, guessing gives {run.chance:.2f}"
        if run.accuracy <= AT_CHANCE * run.chance
        else f"{run.refused:.0%} of the updates were refused as far too large"
    )
    noise = facts.scenario is not None and facts.scenario.budget is not None
    cause = "the noise is stronger than what is learned" if noise else "training diverges"
    return Finding(
        "divergence",
        f"The run has learned little: {why}. Most likely {cause} at lr {run.lr:g}.",
        {"accuracy": run.accuracy, "chance": run.chance, "refused": run.refused, "lr": run.lr},
        "docs/studies/privaasyncfed.md" if noise else "docs/strategies.md#merging-at-once",
    )


def budget(facts: Facts) -> Finding | None:
    found = facts.scenario.budget if facts.scenario else None
    if found is None:
        return None
    spent = f"{found.spent_mean:.3g} on the average device, {found.spent_most:.3g} on the busiest"
    tasks = f"{found.planned_mean:.0f} tasks on average, {found.planned_most:.0f} at most"
    if isfinite(found.allowed):
        text = (
            f"The privacy budget ends the run for some: epsilon {found.limit:g} allows"
            f" {found.allowed:.0f} tasks, and the run has {tasks}. Fast devices retire first."
        )
    elif found.spent_mean > PROMISES_LITTLE:
        text = (
            f"The privacy budget promises little: epsilon {found.nominal:g} is that of one release;"
            f" after {tasks}, it adds up to {spent}."
        )
    else:
        text = f"Privacy: after {tasks}, epsilon adds up to {spent}; no budget is exceeded."
    if facts.run and facts.run.retired:
        text += f" In the run {facts.run.retired:.0%} of the devices retired."
    evidence = {
        "epsilon_mean": found.spent_mean,
        "epsilon_most": found.spent_most,
        "tasks_mean": found.planned_mean,
        "tasks_most": found.planned_most,
        "tasks_allowed": found.allowed,
        "examples_per_device": facts.scenario.examples if facts.scenario else 0.0,
    }
    return Finding("budget", text, evidence, "docs/privacy.md#choosing-settings")


def late_data(facts: Facts) -> Finding | None:
    s = facts.scenario
    if s is None or not s.tied or s.age_behind < OLD:
        return None
    classes = ", ".join(f"{share:.0%} of class {name}" for name, share in s.tied.items())
    who = f"{s.behind} {'late' if s.late else 'slow or unheard'} devices"
    away = " They are away meanwhile." if s.busy else ""
    return Finding(
        "late-data",
        f"Lateness is tied to data: the {who} hold {classes} ({s.behind_share:.0%} of all"
        f" examples). Their updates are {s.age_behind:.1f} epochs old when they come; those of all"
        f" devices {s.age:.1f}.{away}",
        {
            **{f"share_of_{name}": share for name, share in s.tied.items()},
            "devices_behind": s.behind,
            "age_behind_epochs": s.age_behind,
            "age_epochs": s.age,
            "turns_behind": s.turns_behind,
        },
        "docs/studies/feddc.md#devices-that-are-away" if s.busy else "docs/studies/feddc.md",
    )


def worlds(facts: Facts) -> Finding | None:
    s, run = facts.scenario, facts.run
    if s is not None and s.contradicts:
        return Finding(
            "worlds",
            f"Some devices come to call the same things by other names (data.drift.kind ="
            f" {s.drift!r}). One model cannot serve both sides.",
            {"skew": s.skew},
            "docs/studies/echopfl.md#2-a-world-that-changes",
        )
    private = s is not None and s.budget is not None
    if run is None or run.own_mean is None or run.clusters is not None or private:
        return None
    stands = run.gain < RISING and run.accuracy > AT_CHANCE * run.chance
    if run.own_mean >= FITS_NOBODY or not stands:
        return None
    return Finding(
        "worlds",
        f"One model seems not to fit: accuracy on the devices' own data stands at"
        f" {run.own_mean:.2f} and no longer rises. Either the model is too small or the rate too"
        f" low, or devices contradict each other.",
        {"own_mean": run.own_mean, "gain": run.gain},
        "docs/studies/echopfl.md#3-all-methods-on-three-worlds",
    )


def availability(facts: Facts) -> Finding | None:
    s = facts.scenario
    if s is None or (s.away < AWAY and s.unheard < UNHEARD and s.lost < LOST):
        return None
    return Finding(
        "availability",
        f"Devices are often not there: out of reach for {s.away:.0%} of the time; {s.unheard:.0%}"
        f" are not heard once in this run, and {s.lost:.1%} of tasks are lost.",
        {"away": s.away, "unheard": s.unheard, "lost": s.lost},
        "docs/studies/feddc.md#devices-that-are-away",
    )


def staleness(facts: Facts) -> Finding | None:
    s = facts.scenario
    if s is None or s.tied or s.age_behind < OLD:
        return None
    loss = (
        f"They hold {s.behind_share:.0%} of all examples: discounting them would lose that."
        if s.behind_share > MOST
        else "What they hold others hold too (no class is theirs alone), so that discounting them"
        " costs little."
    )
    return Finding(
        "staleness",
        f"{s.behind} devices are behind: their updates are {s.age_behind:.1f} epochs old, those of"
        f" all devices {s.age:.1f}. {loss}",
        {"devices_behind": s.behind, "age_behind_epochs": s.age_behind, "age_epochs": s.age},
        "docs/studies/feddc.md#heterogeneity",
    )


def served_worse(facts: Facts) -> Finding | None:
    run = facts.run
    if run is None:
        return None
    groups = (
        ("late", run.own_late, run.own_others),
        ("seldom heard", run.own_rare, run.own_frequent),
    )
    for name, own, others in groups:
        if own is None or others is None or others - own < SERVED_WORSE:
            continue
        text = (
            f"The {name} devices are served worse: {own:.2f} on their own data, others"
            f" {others:.2f}."
        )
        evidence = {"own": own, "others": others}
        if run.late_weight is not None and run.late_updates:
            text += (
                f" Late devices send {run.late_updates:.1%} of the updates and get"
                f" {run.late_weight:.1%} of the weight."
            )
            evidence |= {"late_updates": run.late_updates, "late_weight": run.late_weight}
        return Finding("served-worse", text, evidence, "docs/strategies.md#how-to-read-it")
    return None


def swings(facts: Facts) -> Finding | None:
    run = facts.run
    # Who still learns swings at any good rate: docs/strategies.md, "the early epochs swing".
    if run is None or run.dip < SWINGS or run.gain >= RISING:
        return None
    return Finding(
        "swings",
        f"The accuracy curve swings: in the second half of the run it fell by {run.dip:.2f} below"
        f" what had been reached. The learning rate of {run.lr:g} is too high for {run.strategy}.",
        {"dip": run.dip, "lr": run.lr},
        "docs/strategies.md#table",
    )


def waiting(facts: Facts) -> Finding | None:
    run = facts.run
    if run is None or run.waiting < WAITING:
        return None
    return Finding(
        "waiting",
        f"Devices had nothing to do for {run.waiting:.0%} of the time: {run.strategy} waits for"
        " the slower ones.",
        {"waiting": run.waiting},
        "docs/gallery.md#a-comparison",
    )


def speed(facts: Facts) -> Finding | None:
    s = facts.scenario
    if s is None or s.speed_ratio < UNEVEN:
        return None
    slow = (
        ""
        if s.late
        else f", and slow updates are {s.turns_behind:.1f} turns of the fleet behind (all:"
        f" {s.turns:.1f}){'' if s.unheard else '. Nobody is late beyond that'}"
    )
    held = ", ".join(f"{share:.0%} of class {name}" for name, share in s.tied.items())
    alone = f" The slow hold {held}." if held and not s.late else ""
    waits = f" {facts.strategy} waits for the slowest." if facts.strategy in SYNCHRONOUS else ""
    return Finding(
        "speed",
        f"Speeds differ: a slow device takes {s.speed_ratio:.1f} times as long as a fast one, so"
        f" fast ones speak more often{slow}.{alone}{waits}",
        {"speed_ratio": s.speed_ratio, "turns": s.turns, "turns_behind": s.turns_behind},
        "docs/strategies.md#merging-at-once",
    )


def heterogeneity(facts: Facts) -> Finding | None:
    s = facts.scenario
    if s is None or s.skew < SKEWED:
        return None
    return Finding(
        "heterogeneity",
        f"Data differ much: label mixes are {s.skew:.2f} of the way from chance (0) to one class"
        f" per device (1); {s.examples:.0f} examples on the median device. A model that follows the"
        " last speaker forgets the others.",
        {"skew": s.skew, "examples_per_device": s.examples},
        "docs/strategies.md#in-short",
    )


def links(facts: Facts) -> Finding | None:
    s = facts.scenario
    if s is None or s.transfer < ON_LINKS:
        return None
    return Finding(
        "links",
        f"Bytes are dear: {s.transfer:.0%} of a task's time goes over links"
        f" ({s.update_bytes / 1e6:.2f} MB each way).",
        {"transfer": s.transfer, "update_bytes": s.update_bytes},
        "docs/strategies.md#how-to-read-it",
    )


def busy_server(facts: Facts) -> Finding | None:
    s = facts.scenario
    if s is None or s.server_load < BUSY_SERVER:
        return None
    return Finding(
        "server",
        f"The server is a bottleneck: merging what arrives takes {s.server_load:.0%} of its time.",
        {"server_load": s.server_load},
        "docs/studies/har.md",
    )


def narrow_models(facts: Facts) -> Finding | None:
    s = facts.scenario
    if s is None or not s.narrow:
        return None
    return Finding(
        "narrow",
        f"{s.narrow:.0%} of the devices carry a narrower network. It spares them work and bytes,"
        " and what they carry served them badly when we measured it (0.68 against 0.95).",
        {"narrow": s.narrow},
        "docs/studies/privaasyncfed.md#3-what-sub-models-save-and-for-whom",
    )


def repair(facts: Facts) -> Finding | None:
    run = facts.run
    if run is None or run.repairs is None:
        return None
    right = "" if run.repairs_right is None else f", right in {run.repairs_right:.0%} of judgements"
    if run.switched_after is not None:
        text = (
            f"Repair first switched itself off after {run.switched_after:.0%} of the commits: there"
            f" most estimates were worse than late updates as they came ({run.repairs}"
            f" repaired in all{right})."
        )
    else:
        text = (
            f"Repair stayed on to the end: {run.repairs} updates repaired{right}, in"
            f" {run.repairing:.1%} of the virtual time of the server."
        )
    evidence = {"repairs": run.repairs, "repairing": run.repairing}
    if run.switched_after is not None:
        evidence["switched_after"] = run.switched_after
    return Finding("repair", text, evidence, "docs/studies/feddc.md#2-whole-federations")


def clusters(facts: Facts) -> Finding | None:
    run = facts.run
    if run is None or run.clusters is None:
        return None
    many = run.clusters > 1
    text = (
        f"Devices ended in {run.clusters} clusters, with {run.own_mean or 0:.2f} on their own data."
        if many
        else "All devices ended in one cluster: they need no models of their own."
    )
    return Finding("clusters", text, {"clusters": run.clusters}, "docs/studies/echopfl.md")


def unfinished(facts: Facts) -> Finding | None:
    run = facts.run
    if run is None or run.gain < RISING:
        return None
    return Finding(
        "unfinished",
        f"The run ended while it was learning: accuracy rose by {run.gain:.2f} in its last"
        " quarter.",
        {"gain": run.gain},
        "docs/config.md#how-to-measure-fairly",
    )


def lost_updates(facts: Facts) -> Finding | None:
    run = facts.run
    if run is None or run.dropped < LOST:
        return None
    return Finding(
        "lost",
        f"{run.dropped:.0%} of the work was thrown away: tasks lost on the way, or updates that"
        f" {run.strategy} did not want.",
        {"dropped": run.dropped},
        "docs/strategies.md#with-a-quorum",
    )


# Measured cost of not heeding it: a model that has learned nothing; 0.5 of the accuracy (noise);
# 0.4 to 1.0 of the accuracy on a class; 0.5 of the devices' own; the same for who is never heard;
# 0.05 to 0.5 for late devices; then time, and what is left between good strategies.
RULES: tuple[Rule, ...] = (
    diverged,
    budget,
    late_data,
    worlds,
    availability,
    served_worse,
    staleness,
    swings,
    waiting,
    speed,
    heterogeneity,
    links,
    busy_server,
    narrow_models,
    lost_updates,
    repair,
    clusters,
    unfinished,
)

NOTHING = Finding(
    "nothing",
    "Nothing stands out: devices are of like speed, reachable, and hold like data. Any strategy"
    " will do, and the simplest is best.",
    {},
    "docs/strategies.md#in-short",
)


def judge(facts: Facts) -> list[Finding]:
    """All that matters, what dominates first; never empty."""
    return list(_found(facts)) or [NOTHING]


def _found(facts: Facts) -> Iterator[Finding]:
    for rule in RULES:
        if (finding := rule(facts)) is not None:
            yield finding
