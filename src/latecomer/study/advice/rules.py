"""Rules that turn facts into findings; thresholds come from our own measurements.

A rule is a pure function that returns None if its facts are below the threshold or unknown. RULES
is ordered by what a problem cost in the studies when it was ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite

from latecomer.study.advice.facts import Facts

# Total epsilon above which the guarantee is weak: docs/privacy.md, "The promise".
WEAK_EPSILON = 10.0
# Age in epochs, the task itself included, from which staleness compensation was better.
# docs/strategies.md: at 4.8 to 6.6 feddc-fedbuff was the fastest; docs/studies/feddc.md, "Delays":
# no gain at 3 (Gamma 2).
OLD_EPOCHS = 4.0
# Age from which it was also clearly better with a quorum: same table, 10 and 40.
VERY_OLD_EPOCHS = 10.0
# Label skew from which lateness, or the order of updates, shows in the model.
# docs/studies/feddc.md, "Heterogeneity": no loss at alpha 1 (skew 0.70 to 0.76 on digits),
# a large one at alpha 0.1 (0.94 to 0.96).
HIGH_SKEW = 0.85
# Speed ratio from which waiting costs: README, four speeds 1 : 8 take fedavg four to five times as
# long. Nothing was measured between 1 and 8; 3 is our choice.
HIGH_SPEED_RATIO = 3.0
# docs/studies/feddc.md, "Devices that are away": a device with one update in 21 epochs contributes
# nothing. Part-time absence was not measured; a fifth of the time, a tenth of the devices or of the
# tasks are our choice.
HIGH_OFFLINE, HIGH_WITHOUT_UPDATE, HIGH_LOSS = 0.2, 0.1, 0.1
# Half of a task on links: docs/strategies.md, "at once or with a quorum" differ by half the bytes.
HIGH_TRANSFER = 0.5
# docs/studies/har.md: ca2fl fails where the server is the bottleneck.
HIGH_SERVER_LOAD = 0.5
# docs/strategies.md, "its lowest after 200 s": in the second half stable strategies stay within
# 0.02 of their end, those near their largest learning rate drop by 0.05 to 0.18.
LARGE_DIP = 0.05
# Accuracy gained in the last quarter of a converged run: below the spread over seeds.
STILL_RISING = 0.02
# docs/strategies.md, column "late devices": 0.95 to 0.98, but 0.89 with fedasync, 0.44 with oort.
ACCURACY_GAP = 0.05
# docs/gallery.md: with fedavg devices are idle for three fifths of the time, else hardly.
HIGH_IDLE = 0.3
# A run without divergence refuses almost no updates; docs/strategies.md saw "a few" near it.
HIGH_REFUSED = 0.05
# docs/studies/echopfl.md: with concept shift one model has a local test accuracy of 0.44; for
# devices with two classes each it has 0.94 and more.
LOW_LOCAL_ACCURACY = 0.6
# Up to this multiple of the accuracy of guessing a model counts as diverged.
CHANCE_FACTOR = 1.5
# Share of all examples from which stragglers hold most of the data.
MAJORITY = 0.5


@dataclass(frozen=True)
class Finding:
    """One problem in words, with its numbers and the document where it was measured."""

    kind: str
    text: str
    evidence: Mapping[str, float]
    see: str


FindingRule = Callable[[Facts], Finding | None]

# fmt: off
SYNCHRONOUS = frozenset((
    "fedavg", "fedprox", "fedavgm", "fedadagrad", "fedyogi", "fedadam", "heterofl", "oort", "ifca",
    "clusterfl",
))
# fmt: on


def divergence(facts: Facts) -> Finding | None:
    run = facts.run
    if run is None or (run.accuracy > CHANCE_FACTOR * run.chance and run.refused < HIGH_REFUSED):
        return None
    why = (
        f"accuracy ended at {run.accuracy:.2f}, guessing gives {run.chance:.2f}"
        if run.accuracy <= CHANCE_FACTOR * run.chance
        else f"{run.refused:.0%} of the updates were refused as far too large"
    )
    noise = facts.scenario is not None and facts.scenario.budget is not None
    cause = "the privacy noise exceeds the signal" if noise else "training diverges"
    return Finding(
        "divergence",
        f"The run has learned little: {why}. Most likely {cause} at lr {run.lr:g}.",
        {"accuracy": run.accuracy, "chance": run.chance, "refused": run.refused, "lr": run.lr},
        "docs/studies/privaasyncfed.md" if noise else "docs/strategies.md#merging-on-arrival",
    )


def budget(facts: Facts) -> Finding | None:
    found = facts.scenario.budget if facts.scenario else None
    if found is None:
        return None
    spent = f"{found.spent_mean:.3g} for the mean device, {found.spent_max:.3g} for the busiest"
    tasks = f"{found.planned_mean:.0f} tasks per device on average, {found.planned_max:.0f} at most"
    if isfinite(found.allowed):
        text = (
            f"The privacy budget runs out: epsilon {found.limit:g} allows {found.allowed:.0f} tasks"
            f" per device, and the run has {tasks}. Fast devices retire first."
        )
    elif found.spent_mean > WEAK_EPSILON:
        text = (
            f"The privacy guarantee is weak: epsilon {found.nominal:g} is that of one release;"
            f" after {tasks}, the total is {spent}."
        )
    else:
        text = f"Privacy: after {tasks}, epsilon totals {spent}; no budget is exceeded."
    if facts.run and facts.run.retired:
        text += f" In the run {facts.run.retired:.0%} of the devices retired."
    evidence = {
        "epsilon_mean": found.spent_mean,
        "epsilon_max": found.spent_max,
        "tasks_mean": found.planned_mean,
        "tasks_max": found.planned_max,
        "tasks_allowed": found.allowed,
        "examples_per_device": facts.scenario.examples if facts.scenario else 0.0,
    }
    return Finding("budget", text, evidence, "docs/privacy.md#choosing-settings")


def late_classes(facts: Facts) -> Finding | None:
    s = facts.scenario
    if s is None or not s.straggler_classes or s.straggler_age < OLD_EPOCHS:
        return None
    stragglers = "late devices" if s.late else "stragglers"
    away = " They do no other work during the delay." if s.busy else ""
    return Finding(
        "late-classes",
        f"Lateness is correlated with data: the {s.stragglers} {stragglers} hold {_held(facts)}"
        f" ({s.straggler_share:.0%} of all examples). Their updates are {s.straggler_age:.1f}"
        f" epochs old on arrival; the mean over all devices is {s.age:.1f}.{away}",
        {
            **{f"share_of_{name}": share for name, share in s.straggler_classes.items()},
            "stragglers": s.stragglers,
            "straggler_age_epochs": s.straggler_age,
            "age_epochs": s.age,
            "straggler_passes": s.straggler_passes,
        },
        "docs/studies/feddc.md#absent-devices" if s.busy else "docs/studies/feddc.md",
    )


def concept_shift(facts: Facts) -> Finding | None:
    s, run = facts.scenario, facts.run
    if s is not None and s.concept_shift:
        return Finding(
            "concept-shift",
            f"Some devices assign other labels to the same inputs (data.drift.kind = {s.drift!r})."
            " One model cannot fit all devices.",
            {"skew": s.skew},
            "docs/studies/echopfl.md#2-concept-shift",
        )
    private = s is not None and s.budget is not None
    if run is None or run.local_mean is None or run.clusters is not None or private:
        return None
    converged = run.gain < STILL_RISING and run.accuracy > CHANCE_FACTOR * run.chance
    if run.local_mean >= LOW_LOCAL_ACCURACY or not converged:
        return None
    return Finding(
        "concept-shift",
        f"One model may not fit all devices: the local test accuracy has stopped rising at"
        f" {run.local_mean:.2f}. Either the model is too small or the learning rate too low, or the"
        " labels of devices contradict each other.",
        {"local_mean": run.local_mean, "gain": run.gain},
        "docs/studies/echopfl.md#3-all-methods-on-three-worlds",
    )


def availability(facts: Facts) -> Finding | None:
    s = facts.scenario
    if s is None or (
        s.offline < HIGH_OFFLINE and s.without_update < HIGH_WITHOUT_UPDATE and s.lost < HIGH_LOSS
    ):
        return None
    return Finding(
        "availability",
        f"Devices are often unavailable: offline for {s.offline:.0%} of the time;"
        f" {s.without_update:.0%} of them send no update in this run, and {s.lost:.1%} of tasks are"
        " lost.",
        {"offline": s.offline, "without_update": s.without_update, "lost": s.lost},
        "docs/studies/feddc.md#absent-devices",
    )


def staleness(facts: Facts) -> Finding | None:
    s = facts.scenario
    if s is None or s.straggler_classes or s.straggler_age < OLD_EPOCHS:
        return None
    loss = (
        f"They hold {s.straggler_share:.0%} of all examples: discounting them would lose that."
        if s.straggler_share > MAJORITY
        else "Other devices hold the same classes, so that discounting them costs little."
    )
    return Finding(
        "staleness",
        f"{s.stragglers} devices are stragglers: their updates are {s.straggler_age:.1f} epochs old"
        f" on arrival; the mean over all devices is {s.age:.1f}. {loss}",
        {"stragglers": s.stragglers, "straggler_age_epochs": s.straggler_age, "age_epochs": s.age},
        "docs/studies/feddc.md#heterogeneity",
    )


def local_accuracy(facts: Facts) -> Finding | None:
    run = facts.run
    if run is None:
        return None
    groups = (
        ("Late devices", run.local_late, run.local_others),
        ("Devices with few updates", run.local_rare, run.local_frequent),
    )
    for name, accuracy, others in groups:
        if accuracy is None or others is None or others - accuracy < ACCURACY_GAP:
            continue
        text = f"{name} have a lower local test accuracy: {accuracy:.2f}, the others {others:.2f}."
        evidence = {"local": accuracy, "others": others}
        if run.late_weight is not None and run.late_updates:
            text += (
                f" Late devices send {run.late_updates:.1%} of the updates and get"
                f" {run.late_weight:.1%} of the weight."
            )
            evidence |= {"late_updates": run.late_updates, "late_weight": run.late_weight}
        return Finding("local-accuracy", text, evidence, "docs/strategies.md#how-to-read-it")
    return None


def oscillation(facts: Facts) -> Finding | None:
    run = facts.run
    # Before convergence curves oscillate at any good rate: docs/strategies.md, "the early epochs".
    if run is None or run.dip < LARGE_DIP or run.gain >= STILL_RISING:
        return None
    return Finding(
        "oscillation",
        f"The accuracy oscillates: in the second half of the run it dropped by {run.dip:.2f} below"
        f" its previous best. The learning rate of {run.lr:g} is too high for {run.strategy}.",
        {"dip": run.dip, "lr": run.lr},
        "docs/strategies.md#table",
    )


def idle(facts: Facts) -> Finding | None:
    run = facts.run
    if run is None or run.idle < HIGH_IDLE:
        return None
    return Finding(
        "idle",
        f"Devices were idle for {run.idle:.0%} of the time: {run.strategy} waits for slow devices.",
        {"idle": run.idle},
        "docs/gallery.md#a-comparison",
    )


def speed(facts: Facts) -> Finding | None:
    s = facts.scenario
    if s is None or s.speed_ratio < HIGH_SPEED_RATIO:
        return None
    slow = (
        ""
        if s.late
        else f", and updates of stragglers are {s.straggler_passes:.1f} fleet passes stale (mean:"
        f" {s.passes:.1f}){'' if s.without_update else '. No device is late beyond that'}"
    )
    alone = f" Stragglers hold {_held(facts)}." if s.straggler_classes and not s.late else ""
    waits = f" {facts.strategy} waits for the slowest." if facts.strategy in SYNCHRONOUS else ""
    return Finding(
        "speed",
        f"Speeds differ: a slow device takes {s.speed_ratio:.1f} times as long as a fast one, so"
        f" fast devices send more updates{slow}.{alone}{waits}",
        {
            "speed_ratio": s.speed_ratio,
            "passes": s.passes,
            "straggler_passes": s.straggler_passes,
        },
        "docs/strategies.md#merging-on-arrival",
    )


def heterogeneity(facts: Facts) -> Finding | None:
    s = facts.scenario
    if s is None or s.skew < HIGH_SKEW:
        return None
    return Finding(
        "heterogeneity",
        f"Label distributions differ: the label skew is {s.skew:.2f} (0: random partition, 1: one"
        f" class per device), with {s.examples:.0f} examples on the median device. A model that"
        " follows the latest update forgets the other devices' classes.",
        {"skew": s.skew, "examples_per_device": s.examples},
        "docs/strategies.md#in-short",
    )


def bandwidth(facts: Facts) -> Finding | None:
    s = facts.scenario
    if s is None or s.transfer < HIGH_TRANSFER:
        return None
    return Finding(
        "bandwidth",
        f"Communication is expensive: {s.transfer:.0%} of a task's time is transfer"
        f" ({s.update_bytes / 1e6:.2f} MB each way).",
        {"transfer": s.transfer, "update_bytes": s.update_bytes},
        "docs/strategies.md#how-to-read-it",
    )


def server_load(facts: Facts) -> Finding | None:
    s = facts.scenario
    if s is None or s.server_load < HIGH_SERVER_LOAD:
        return None
    return Finding(
        "server",
        f"The server is a bottleneck: merging updates takes {s.server_load:.0%} of its time.",
        {"server_load": s.server_load},
        "docs/studies/har.md",
    )


def submodels(facts: Facts) -> Finding | None:
    s = facts.scenario
    if s is None or not s.narrow:
        return None
    return Finding(
        "sub-models",
        f"{s.narrow:.0%} of the devices train a narrower sub-model. It saves computation and bytes,"
        " but its local test accuracy was low when we measured it (0.68 against 0.95).",
        {"narrow": s.narrow},
        "docs/studies/privaasyncfed.md#3-what-sub-models-save",
    )


def lost_updates(facts: Facts) -> Finding | None:
    run = facts.run
    if run is None or run.dropped < HIGH_LOSS:
        return None
    return Finding(
        "lost",
        f"{run.dropped:.0%} of the work was lost: tasks that failed, or updates that {run.strategy}"
        " rejected.",
        {"dropped": run.dropped},
        "docs/strategies.md#with-a-quorum",
    )


def compensation(facts: Facts) -> Finding | None:
    run = facts.run
    if run is None or run.compensated is None:
        return None
    better = run.compensation_better
    validated = "" if better is None else f"; it reduced the error in {better:.0%} of validations"
    updates = f"{run.compensated} updates compensated{validated}"
    if run.switched_after is not None:
        text = (
            f"Staleness compensation was first switched off after {run.switched_after:.0%} of the"
            f" commits, because it increased the error ({updates})."
        )
    else:
        text = (
            f"Staleness compensation stayed on to the end ({updates}; it took"
            f" {run.compensation_load:.1%} of the virtual time of the server)."
        )
    evidence = {"compensated": run.compensated, "compensation_load": run.compensation_load}
    if run.switched_after is not None:
        evidence["switched_after"] = run.switched_after
    return Finding("compensation", text, evidence, "docs/studies/feddc.md#2-whole-federations")


def clusters(facts: Facts) -> Finding | None:
    run = facts.run
    if run is None or run.clusters is None:
        return None
    text = (
        f"Devices ended in {run.clusters} clusters, with a local test accuracy of"
        f" {run.local_mean or 0:.2f}."
        if run.clusters > 1
        else "All devices ended in one cluster: one model fits them."
    )
    return Finding("clusters", text, {"clusters": run.clusters}, "docs/studies/echopfl.md")


def unfinished(facts: Facts) -> Finding | None:
    run = facts.run
    if run is None or run.gain < STILL_RISING:
        return None
    return Finding(
        "unfinished",
        f"The run ended before it converged: accuracy rose by {run.gain:.2f} in its last quarter.",
        {"gain": run.gain},
        "docs/config.md#how-to-measure-fairly",
    )


def _held(facts: Facts) -> str:
    """`90% of class 5`: the classes that stragglers hold almost alone."""
    classes = facts.scenario.straggler_classes if facts.scenario else {}
    return ", ".join(f"{share:.0%} of class {name}" for name, share in classes.items())


# Measured cost of ignoring each: a model at chance; 0.5 of the accuracy (noise); 0.4 to 1.0 of the
# accuracy on a class; 0.5 of the local test accuracy; the same for devices without updates; 0.05 to
# 0.5 for late devices; then time, and differences between good strategies.
RULES: tuple[FindingRule, ...] = (
    divergence,
    budget,
    late_classes,
    concept_shift,
    availability,
    local_accuracy,
    staleness,
    oscillation,
    idle,
    speed,
    heterogeneity,
    bandwidth,
    server_load,
    submodels,
    lost_updates,
    compensation,
    clusters,
    unfinished,
)

NOTHING = Finding(
    "nothing",
    "No problem stands out: devices have similar speeds and data and are available. Any strategy"
    " works; take the simplest.",
    {},
    "docs/strategies.md#in-short",
)


def diagnose(facts: Facts) -> list[Finding]:
    """The findings of all RULES in their order; [NOTHING] if there are none."""
    return [found for rule in RULES if (found := rule(facts)) is not None] or [NOTHING]
