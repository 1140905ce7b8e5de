"""A device's message is hostile until checked."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from latecomer.core.messages import Task, Update

MOST_EXAMPLES = 10**9
LARGEST_METRIC = 1e300
LARGEST_NOISE = 1e6  # its square must stay a number


class Checks:
    """Refuses updates that are malformed, not finite, or far larger than the usual ones.

    The norm bound is `norm_ratio` times the largest median that the last `window` accepted norms
    ever had. A median cannot be walked upwards by a few devices, and keeping its largest value
    leaves room for a late device that still has much to say after the others have converged.
    It takes effect after `warmup` accepted updates; norm_ratio 0 switches it off.

    No device can have more than `most_examples`: set it where examples are what weighs an update.
    """

    def __init__(
        self,
        norm_ratio: float = 20.0,
        window: int = 101,
        warmup: int = 20,
        most_examples: int = MOST_EXAMPLES,
    ) -> None:
        self.norm_ratio, self.window, self.warmup = norm_ratio, window, warmup
        self.most_examples = most_examples
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._reference = 0.0

    def reason_to_refuse(self, task: Task, update: Update) -> str | None:
        """Why this update must not touch the model, or None; an accepted one is remembered."""
        delta = update.delta
        most, count = self.most_examples, update.num_examples
        if type(count) is not int or not 1 <= count <= most:
            return f"num_examples must be a whole number from 1 to {most:,}"
        if not isinstance(update.metrics, Mapping) or not all(
            type(v) in (int, float) and abs(v) <= LARGEST_METRIC for v in update.metrics.values()
        ):
            return "a metric is not a finite number"
        noise = update.noise_std
        if type(noise) not in (int, float) or not 0 <= noise <= LARGEST_NOISE:
            return f"noise_std must be a number from 0 to {LARGEST_NOISE:g}"
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
        bound = self.norm_ratio * self._reference
        if self.norm_ratio and len(self._recent) >= self.warmup and norm > bound > 0:
            return f"norm {norm:.3g} exceeds {bound:.3g} ({self.norm_ratio:g} x the usual)"
        self._remember(norm)
        return None

    def _remember(self, norm: float) -> None:
        self._recent.append(norm)
        insort(self._sorted, norm)
        if len(self._recent) > self.window:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        if len(self._recent) >= min(self.warmup, self.window):
            self._reference = max(self._reference, self._sorted[len(self._sorted) // 2])

    def state(self) -> dict[str, Any]:
        return {"recent": list(self._recent), "reference": self._reference}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._recent = deque(state["recent"])
        self._sorted = sorted(self._recent)
        self._reference = state["reference"]
