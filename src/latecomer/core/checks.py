"""Checks of updates before they touch the model: a device's message is hostile until checked."""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Mapping
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from latecomer.core.messages import Task, Update

MAX_EXAMPLES = 10**9
MAX_METRIC = 1e300
MAX_NOISE = 1e6  # its square must stay a number


class LargestMedian:
    """The largest median that the last `window` values of a quantity have had so far.

    A few devices cannot raise a median, and keeping its largest value leaves room for late devices
    with large updates after the others have converged. At most `votes` of the values are of one
    device, so that one that answers often does not decide alone. No bound before `warmup` values.
    """

    def __init__(self, window: int, warmup: int, votes: int) -> None:
        self.window, self.warmup, self.votes = window, warmup, votes
        self._recent: deque[tuple[int, float]] = deque()  # device, value
        self._votes: Counter[int] = Counter()
        self._sorted: list[float] = []
        self._reference = 0.0

    def bound(self, ratio: float) -> float:
        """`ratio` times the reference; infinite for 0 and before `warmup` values."""
        bound = ratio * self._reference
        return bound if ratio and len(self._recent) >= self.warmup and bound > 0 else inf

    def remember(self, device: int, value: float) -> None:
        self._recent.append((device, value))
        self._votes[device] += 1
        insort(self._sorted, value)
        if self._votes[device] > self.votes:
            self._forget(next(place for place, (d, _) in enumerate(self._recent) if d == device))
        elif len(self._recent) > self.window:
            self._forget(0)
        if len(self._recent) >= min(self.warmup, self.window):
            self._reference = max(self._reference, self._sorted[len(self._sorted) // 2])

    def _forget(self, place: int) -> None:
        device, value = self._recent[place]
        del self._recent[place]
        del self._sorted[bisect_left(self._sorted, value)]
        self._votes[device] -= 1
        if not self._votes[device]:
            del self._votes[device]

    def state(self) -> dict[str, Any]:
        return {"recent": list(self._recent), "reference": self._reference}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._recent = deque((int(device), float(value)) for device, value in state["recent"])
        self._votes = Counter(device for device, _ in self._recent)
        self._sorted = sorted(value for _, value in self._recent)
        self._reference = state["reference"]


class Checks:
    """Refuses updates that are malformed, not finite, or far larger than the median.

    A delta's norm may be `norm_ratio` times the largest median of accepted ones, the number of
    examples `examples_ratio` times (0 switches either off), once `warmup` updates have been
    accepted; the number of examples is never above `max_examples`. Medians are over the last
    `window` accepted updates, at most `votes` of one device (0: any number).
    """

    def __init__(
        self,
        norm_ratio: float = 20.0,
        window: int = 101,
        warmup: int = 20,
        examples_ratio: float = 100.0,
        max_examples: int = MAX_EXAMPLES,
        votes: int = 10,
    ) -> None:
        self.norm_ratio, self.examples_ratio = norm_ratio, examples_ratio
        self.max_examples = max_examples
        of_each = votes or window
        self._norms, self._examples = (LargestMedian(window, warmup, of_each) for _ in range(2))

    def reason_to_refuse(self, task: Task, update: Update) -> str | None:
        """Why this update is refused, or None; an accepted one enters the medians."""
        delta = update.delta
        examples = update.num_examples
        if type(examples) is not int or not 1 <= examples <= self.max_examples:
            return f"num_examples must be a whole number from 1 to {self.max_examples:,}"
        if examples > (most := self._examples.bound(self.examples_ratio)):
            limit = f"{self.examples_ratio:g} x the median"
            return f"num_examples = {examples:,} exceeds {most:,.0f} ({limit})"
        if not isinstance(update.metrics, Mapping) or not all(
            type(v) in (int, float) and abs(v) <= MAX_METRIC for v in update.metrics.values()
        ):
            return "a metric is not a finite number"
        noise = update.noise_std
        if type(noise) not in (int, float) or not 0 <= noise <= MAX_NOISE:
            return f"noise_std must be a number from 0 to {MAX_NOISE:g}"
        if type(update.choice) is not int or not task.was_sent(update.choice):
            most = len(task.offers) + len(task.broadcasts)
            return f"choice must be the number of a model it was sent, 0 to {most}"
        if type(update.epsilon) not in (int, float) or not 0 <= update.epsilon < inf:
            return "epsilon must be a finite number from 0"
        if type(update.last) is not bool:
            return "last must be true or false"
        if delta is None:
            return None
        if not isinstance(delta, Tensor):
            return f"delta is a {type(delta).__name__}, must be a float32 vector"
        if delta.dtype != torch.float32 or delta.dim() != 1:
            return f"delta is {delta.dtype} with {delta.dim()} axes, must be a float32 vector"
        if delta.numel() != task.params.numel():
            return f"delta has {delta.numel()} values, the task has {task.params.numel()}"
        norm = torch.linalg.vector_norm(delta).item()
        if not isfinite(norm):
            return "delta is not finite"
        if norm > (bound := self._norms.bound(self.norm_ratio)):
            return f"norm {norm:.3g} exceeds {bound:.3g} ({self.norm_ratio:g} x the median)"
        self._norms.remember(task.device, norm)
        if self.examples_ratio:
            self._examples.remember(task.device, examples)
        return None

    def state(self) -> dict[str, Any]:
        return {**self._norms.state(), "examples": self._examples.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._norms.restore(state)
        self._examples.restore(state["examples"])
