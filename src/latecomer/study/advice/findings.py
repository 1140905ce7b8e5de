"""Problems of a scenario or a run, each with the effect that was measured, if one was."""

from collections.abc import Iterator
from dataclasses import dataclass

from latecomer.study.advice.facts import Facts, Run, Scenario

LEARNING_RATE = "learning rate"
# Total epsilon above which the guarantee is weak: docs/privacy.md, "The promise".
WEAK_EPSILON = 10.0
# Age of updates in epochs, the task itself included. docs/studies/feddc.md, "Delays": compensation
# gains nothing at 3.
OLD_EPOCHS = 4.0
# docs/studies/feddc.md, "Heterogeneity": lateness costs nothing at alpha 1 (skew 0.70 to 0.76 on
# digits) and much at alpha 0.1 (0.94 to 0.96).
HIGH_SKEW = 0.85
# Thresholds without a source are our choice.


@dataclass(frozen=True)
class Finding:
    """One problem: its numbers in words, and what it costs as a share `effect` of `unit`.

    `effect` is None if nothing was measured that shows a cost.
    """

    kind: str
    text: str
    effect: float | None = None
    unit: str = ""

    @property
    def is_ranked(self) -> bool:
        """Whether an effect was measured, or all else depends on it."""
        return self.kind == LEARNING_RATE or self.effect is not None


NOTHING = Finding("nothing stands out", "Devices have similar speeds and data and are available.")


def findings_of(facts: Facts) -> list[Finding]:
    """All findings; [NOTHING] if there are none.

    A wrong learning rate is first, because a run that has not learned shows nothing else. Then come
    findings with a measured effect, the largest share first, and the others in alphabetical order.
    """
    found = list(_of_run(facts.run)) if facts.run else []
    found += _of_scenario(facts.scenario) if facts.scenario else ()
    return sorted(found, key=_rank) or [NOTHING]


def _rank(finding: Finding) -> tuple[bool, float, str]:
    return finding.kind != LEARNING_RATE, -(finding.effect or 0.0), finding.kind


def _of_run(run: Run) -> Iterator[Finding]:
    if run.rate is not None:
        text = f"training.lr = {run.lr:g} is too {'small' if run.rate.too_small else 'large'}"
        end = f"accuracy at the end: {run.accuracy:.2f}"
        yield Finding(LEARNING_RATE, f"{text}: {run.rate.text}; {end}.")
    elif run.dip >= 0.05 and run.gain < 0.02:  # a run that still rises oscillates at any good rate
        text = f"In the second half the accuracy fell to {run.dip:.2f} below its best so far:"
        text += f" training.lr = {run.lr:g} may be too large for {run.strategy}."
        yield Finding("oscillation", text, run.dip, "of accuracy")
    if run.gain >= 0.02:
        text = f"Accuracy rose by {run.gain:.2f} in the last quarter of the run."
        yield Finding("run too short", text, run.gain, "of accuracy")
    late, others = run.local_late, run.local_others
    if late is not None and others is not None and others - late >= 0.05:
        text = f"{run.late_are} have a local test accuracy of {late:.2f}, the others {others:.2f}."
        yield Finding("low local accuracy", text, others - late, "of their accuracy")
    if run.idle >= 0.3:
        text = f"{run.strategy} left devices without a task that were online."
        yield Finding("idle devices", text, run.idle, "of device time")
    if run.dropped >= 0.1:
        text = f"Tasks failed, or {run.strategy} rejected their updates."
        yield Finding("lost work", text, run.dropped, "of tasks")


def _of_scenario(s: Scenario) -> Iterator[Finding]:
    if s.server_load >= 0.5:
        text = f"Merging the updates that arrive takes {s.server_load:.0%} of the server's time."
        queued = 1 - 1 / s.server_load if s.server_load > 1 else None
        yield Finding("server load", text, queued, "of updates cannot be merged in time")
    away = {
        "of device time": s.offline,
        "of devices without an update": s.without_update,
        "of tasks lost": s.lost,
    }
    unit = max(away, key=lambda each: away[each])
    if away[unit] >= 0.1:
        text = f"Devices are offline for {s.offline:.0%} of the time, {s.without_update:.0%} of"
        text += f" them send no update in the dry run, {s.lost:.0%} of tasks are lost."
        yield Finding("unavailable devices", text, away[unit], unit)
    if s.straggler_age >= OLD_EPOCHS:
        held = ", ".join(f"{share:.0%} of class {c}" for c, share in s.straggler_classes.items())
        text = f"The updates of {s.stragglers} devices are {s.straggler_age:.1f} epochs old on"
        text += f" arrival (mean over all devices: {s.age:.1f}). They hold"
        text += f" {held or 'classes that other devices hold too'}."
        kind = "late classes" if held else "staleness"
        yield Finding(kind, text, s.straggler_share, "of examples")
    if s.transfer >= 0.5:
        text = f"The model has {s.update_bytes / 1e6:.2f} MB, once each way."
        yield Finding("communication", text, s.transfer, "of a task's time")
    if s.speed_ratio >= 3:
        text = f"A slow device takes {s.speed_ratio:.1f} times as long as a fast one."
        yield Finding("unequal speeds", text)
    if s.concept_shift:
        text = f"data.drift.kind = {s.drift!r} gives other labels to the same inputs on some"
        yield Finding("concept shift", f"{text} devices: one model cannot fit all devices.")
    if s.skew >= HIGH_SKEW:
        text = f"The label skew is {s.skew:.2f} (0: random partition, 1: one class per device),"
        text += f" with {s.examples:.0f} examples on the median device."
        yield Finding("heterogeneous data", text)
    if (b := s.budget) is not None:
        text = f"After {b.tasks_mean:.0f} tasks per device on average, {b.tasks_max:.0f} at most,"
        text += f" epsilon would total {b.spent_mean:.3g} and {b.spent_max:.3g}"
        text += f" (limit: {b.limit:g})." if b.limit else " (no limit)."
        yield Finding("privacy budget", text)
