"""Whether the test loss of a run shows a learning rate that is far too small or too large."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import median

from latecomer.core.strategy import Stateful

# Measured on digits with eight strategies, nine rates from 0.001 to 10, 100 skewed devices of four
# speeds and 20 equal ones: after a fifth of a run that ended well the loss had fallen by at least
# 5%; models at rates that were too small ended within 0.6 of their initial norm, models at rates
# that were too large at 2 or more.
MIN_FALL = 0.05  # of the initial loss; less: it has hardly moved
FELL = 0.1  # of the initial loss; a loss that fell by this and came back has diverged
RISE = 1.5  # times the initial loss; more: it has blown up
FAR = 1.0  # distance from the initial model over its norm
REFUSED = 0.05  # share of updates that are refused, as not finite or far too large
SLOW = 0.5  # of the initial loss; a loss above it that still falls is too slow
SMOOTH = 0.02  # of the initial loss; largest rise of a curve that falls steadily
MIN_SHARE = 0.2  # of a run before it is checked
MIN_EVALUATIONS = 5
LAST = 3  # evaluations whose median is the present loss
STEP = 3.0  # factor between the present rate and the one to try


@dataclass(frozen=True)
class RateProblem:
    """`text` is what the loss did; `lr` is the learning rate to try."""

    too_small: bool
    text: str
    lr: float


def rate_problem(
    losses: Sequence[float], refused: float, distance: float, lr: float, ended: bool = False
) -> RateProblem | None:
    """What the test losses, from that of the initial model on, say about the learning rate.

    `refused` is the share of refused updates, `distance` that of the model from the initial one
    over the norm of the initial one. Of a run that has `ended`, a loss that is still high and falls
    steadily counts too. None: nothing, or fewer than MIN_EVALUATIONS after the first.
    """
    if len(losses) <= MIN_EVALUATIONS:
        return None
    if not all(isfinite(loss) for loss in losses):
        return _too_large("the loss is not finite", lr)
    first, *seen = losses
    now, low, high = median(seen[-LAST:]), min(seen), max(seen)
    if refused >= REFUSED:
        return _too_large(f"{refused:.0%} of the updates were refused", lr)
    if now <= (1 - MIN_FALL) * first:
        slow = ended and now > SLOW * first and _falls_steadily(seen, first)
        return _too_small("the loss still falls", first, now, lr) if slow else None
    if high > RISE * first:
        return _too_large(f"the loss rose from {first:.3g} to {high:.3g}", lr)
    if low < (1 - FELL) * first:
        return _too_large(f"the loss fell to {low:.3g} and came back to {now:.3g}", lr)
    if distance > FAR:
        moved = f"the model has moved by {distance:.1f} times its norm"
        return _too_large(f"the loss is {now:.3g} ({first:.3g} at first) and {moved}", lr)
    if low > (1 - MIN_FALL) * first:
        return _too_small("the loss has hardly moved", first, now, lr)
    return None


def _falls_steadily(losses: Sequence[float], first: float) -> bool:
    """Whether the second half falls by more than SMOOTH of `first` and never rises by as much."""
    half, best, rise = losses[len(losses) // 2 :], inf, 0.0
    for loss in half:
        best = min(best, loss)
        rise = max(rise, loss - best)
    return half[0] - half[-1] > SMOOTH * first > rise


def _too_large(text: str, lr: float) -> RateProblem:
    return RateProblem(False, text, float(f"{lr / STEP:.2g}"))


def _too_small(text: str, first: float, now: float, lr: float) -> RateProblem:
    text = f"{text} ({first:.3g} at first, now {now:.3g})"
    return RateProblem(True, text, float(f"{lr * STEP:.2g}"))


class RateWarning(Stateful):
    """One warning per run: checks every evaluation after MIN_SHARE of the run and a fleet pass."""

    kept = ("text", "_losses")

    def __init__(self, lr: float, devices: int, noise: bool) -> None:
        self.lr, self.devices, self.noise = lr, devices, noise
        self.text: str | None = None  # the warning, once given
        self._losses: list[float] = []

    def record(
        self, loss: float, distance: float, share: float, updates: int, refused: int
    ) -> str | None:
        """Adds an evaluation; returns the warning the first time that there is one.

        `distance` is that of `rate_problem`, `share` the share of the run that is done; `updates`
        and `refused` count the updates so far.
        """
        if self.text is not None:
            return None
        self._losses.append(loss)
        if share < MIN_SHARE or updates < self.devices:
            return None
        lost = refused / max(1, updates + refused)
        found = rate_problem(self._losses, lost, distance, self.lr)
        if found is None:
            return None
        way = "small" if found.too_small else "large"
        noise = ", or the privacy noise" if self.noise else ""
        self.text = (
            f"after {updates} updates {found.text}: training.lr = {self.lr:g} may be too {way}"
            f"{noise}; try {found.lr:g}, or find a rate with `latecomer tune`"
        )
        return self.text
