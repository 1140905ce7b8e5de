"""Checks of updates before they touch the model: a device's message is hostile until checked."""

from collections.abc import Mapping, Sequence
from math import ceil, inf, isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from latecomer.core.messages import Task, Update

MAX_EXAMPLES = 10**9
MAX_METRIC = 1e300
MAX_NOISE = 1e6  # its square must stay a number
MIN_DEVICES = 5  # for a median that one or two of them cannot decide
MAX_STRIKES = 3
MIN_SHARE = 5  # one in so many devices has to be refused before the model is suspected
INFLATION = 2.0  # largest model norm on probation, over that of the first model


class LargestMedian:
    """The running maximum of a median: the median over devices of each device's largest value.

    Each of the last `window` devices counts once, so neither one that answers often nor a minority
    of hostile ones can raise it. It never falls, so updates of late devices are not refused after
    the others have converged. `known` from `MIN_DEVICES` devices on; with 3 or 4 devices from
    `warmup` values on, where a device counts with at most a third of `warmup`.
    """

    def __init__(self, window: int, warmup: int) -> None:
        self.window, self.warmup = window, warmup
        self._devices: dict[int, tuple[float, int]] = {}  # largest value and count, latest last
        self._reference = 0.0

    @property
    def known(self) -> bool:
        devices, each = len(self._devices), ceil(self.warmup / 3)
        return devices >= MIN_DEVICES or (
            devices >= 3 and sum(min(n, each) for _, n in self._devices.values()) >= self.warmup
        )

    def bound(self, ratio: float) -> float:
        """`ratio` times the reference; infinite for 0 and while it is not known."""
        bound = ratio * self._reference
        return bound if bound > 0 else inf

    def remember(self, device: int, value: float) -> None:
        largest, count = self._devices.pop(device, (0.0, 0))
        self._devices[device] = max(largest, value), count + 1
        if count and value <= largest and self._reference:
            return  # the values are the same, and so is their median
        if len(self._devices) > self.window:
            del self._devices[next(iter(self._devices))]
        if self.known:
            values = sorted(largest for largest, _ in self._devices.values())
            self._reference = max(self._reference, values[(len(values) - 1) // 2])

    @property
    def largest(self) -> dict[int, float]:
        """Device -> its largest value."""
        return {device: largest for device, (largest, _) in self._devices.items()}

    def state(self) -> list[Any]:
        return [list(self._devices.items()), self._reference]

    def restore(self, state: Sequence[Any]) -> None:
        devices, self._reference = state
        self._devices = {device: (largest, count) for device, (largest, count) in devices}


class Checks:
    """Refuses updates that are malformed, not finite, or far larger than those of other devices.

    A delta's norm may be `norm_ratio` times the reference (`LargestMedian`) of accepted ones, the
    number of examples `examples_ratio` times (0 switches either off), and never above
    `max_examples`. While the reference is not known, the norm is bounded by `norm_ratio` times the
    scale of the model (`first_scale`), and updates are accepted on probation: if one of them
    exceeds its bound once the reference is known, `trouble` asks for a roll-back. It also does so
    if, on probation, a device sent an update larger than the first model and devices then trained
    on a model more than `INFLATION` times as large as the first: their norms are no reference. And
    it does so if the last updates of most devices were refused. With `stop` the run ends after a
    roll-back.

    `strikes` of a device: +1 for a refused update, -1 for an accepted one, 0 at least; the server
    quarantines a device from `MAX_STRIKES` on.
    """

    def __init__(
        self,
        norm_ratio: float = 20.0,
        window: int = 101,
        warmup: int = 20,
        examples_ratio: float = 100.0,
        max_examples: int = MAX_EXAMPLES,
        stop: bool = False,
    ) -> None:
        self.norm_ratio, self.examples_ratio = norm_ratio, examples_ratio
        self.max_examples, self.window, self.warmup, self.stop = max_examples, window, warmup, stop
        self.strikes: dict[int, int] = {}
        self._restarted = False  # the reference was learned anew because the model had grown
        self.reset()

    def reset(self) -> None:
        """Forget all devices."""
        self._norms, self._examples = (LargestMedian(self.window, self.warmup) for _ in range(2))
        self._probation = True  # some updates were accepted without a reference
        self._refused: dict[int, str] = {}  # device -> why its last update was, "" if accepted
        self._first_rms: float | None = None  # of the parameters of the first model trained on
        self._grown = False  # a model trained on during probation exceeds `INFLATION` times it
        self._noise: dict[int, float] = {}  # device -> noise_std it claimed on probation
        self._suspects: dict[int, float] = {}  # device -> noise_std that excuses its large update
        self.strikes.clear()

    def reason_to_refuse(self, task: Task, update: Update) -> str | None:
        """Why this update is refused, or None; an accepted one enters the medians."""
        device, reason = task.device, self._reason(task, update)
        self._refused.pop(device, None)
        self._refused[device] = reason or ""
        if len(self._refused) > self.window:
            del self._refused[next(iter(self._refused))]
        strikes = self.strikes.pop(device, 0) + (1 if reason else -1)
        if strikes > 0:
            self.strikes[device] = strikes
        return reason

    @property
    def undisturbed(self) -> bool:
        """Whether the reference is known, and the last updates of few devices were refused.

        Few: less than one in `MIN_SHARE`. A hostile device alone does not prevent snapshots.
        """
        refused = sum(map(bool, self._refused.values()))
        return self._norms.known and MIN_SHARE * refused < len(self._refused)

    def trouble(self, devices: int) -> str | None:
        """Why the model has to be rolled back, or None; `devices` is the size of the fleet.

        The devices at fault get `MAX_STRIKES`. All references are forgotten in two cases:
        - the model grew on probation after updates of a minority exceeded it (once in a run);
        - the last updates of c devices were refused, where c is more than half of the devices that
          answered and at least max(3, min(devices, window) / `MIN_SHARE`). In a fleet of fewer than
          3, the last updates of all must be refused and each have `MAX_STRIKES`.
        """
        if self._probation and self._norms.known:
            self._probation = False
            suspects, grown = self._take_suspects(), self._grown
            # If most updates exceed the first model, that model is small, and nobody is at fault.
            few = 0 < 2 * len(suspects) < len(self._refused)
            if grown and few and not self._restarted:
                self._restarted = True
                self._start_anew(suspects)
                which = ", ".join(map(str, sorted(suspects)))
                return f"first updates, of devices {which}, exceed the norm of the model"
            bounds = (self._norms, self.norm_ratio), (self._examples, self.examples_ratio)
            at_fault = {
                device
                for values, ratio in bounds
                for device, value in values.largest.items()
                if value > values.bound(ratio)
            }
            self.strikes |= dict.fromkeys(at_fault, MAX_STRIKES)
            if at_fault:
                which = ", ".join(map(str, sorted(at_fault)))
                return (
                    f"first updates, of devices {which}, exceed {self.norm_ratio:g} x the median"
                    f" norm or {self.examples_ratio:g} x the median number of examples"
                )
        if not self.strikes:
            return None
        reasons = [reason for reason in self._refused.values() if reason]
        count, answered = len(reasons), len(self._refused)
        fewest = max(3, ceil(min(devices, self.window) / MIN_SHARE))
        if 2 * count <= answered or count < min(fewest, devices):
            return None
        if count < 3 and min(self.strikes.get(d, 0) for d in self._refused) < MAX_STRIKES:
            return None
        self._start_anew(self._take_suspects())
        return f"the last updates of {count} of {answered} devices were refused: {reasons[-1]}"

    def _start_anew(self, suspects: set[int]) -> None:
        """Forget all devices; suspects get `MAX_STRIKES` if they are a minority."""
        minority = 2 * len(suspects) < len(self._refused)
        self.reset()
        if minority:
            self.strikes |= dict.fromkeys(suspects, MAX_STRIKES)

    def _take_suspects(self) -> set[int]:
        """Devices with a first update larger than the first model that noise does not explain.

        Noise explains it up to `INFLATION` times the median noise_std that devices reported. The
        records are cleared.
        """
        claims = sorted(self._noise.values())
        usual = INFLATION * claims[(len(claims) - 1) // 2] if claims else 0.0
        found = {device for device, noise in self._suspects.items() if noise > usual}
        self._suspects, self._noise = {}, {}
        return found

    def _reason(self, task: Task, update: Update) -> str | None:
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
        if not self._norms.known:
            bound = self.norm_ratio * first_scale(task, update)
            if bound and norm > bound:
                limit = f"{self.norm_ratio:g} x the scale of the model"
                return f"norm {norm:.3g} exceeds {bound:.3g} ({limit})"
            self._note_growth(task, norm, update.noise_std)
        self._norms.remember(task.device, norm)
        self._examples.remember(task.device, examples)
        return None

    def _note_growth(self, task: Task, norm: float, noise: float) -> None:
        """Note whether the model has grown on probation, and whose updates exceeded it before.

        A first model of zeros has no scale to compare with.
        """
        size = sqrt(task.params.numel())
        model = torch.linalg.vector_norm(task.params).item() / size
        if self._first_rms is None:
            self._first_rms = model
        first = self._first_rms
        if not first or not self.norm_ratio:
            return
        self._noise[task.device] = noise
        if model > INFLATION * first:
            self._grown = True
        elif norm > first * size:
            explained = norm <= (first + 2 * noise) * size
            self._suspects[task.device] = noise if explained else inf

    def state(self) -> dict[str, Any]:
        return {
            "norms": self._norms.state(),
            "examples": self._examples.state(),
            "probation": self._probation,
            "refused": list(self._refused.items()),
            "strikes": dict(self.strikes),
            "growth": [self._first_rms, self._grown, self._restarted],
            "suspects": [list(self._noise.items()), list(self._suspects.items())],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._norms.restore(state["norms"])
        self._examples.restore(state["examples"])
        self._probation = state["probation"]
        self._refused, self.strikes = dict(state["refused"]), dict(state["strikes"])
        self._first_rms, self._grown, self._restarted = state["growth"]
        self._noise, self._suspects = map(dict, state["suspects"])


def first_scale(task: Task, update: Update) -> float:
    """The norm to which a first update is compared: the largest of

    - the norm of the model, or sqrt(n) if its n parameters are all zero;
    - lr * steps * sqrt(n) / (1 - momentum): all steps with gradients of root mean square 1, which
      Adam's do not exceed;
    - noise_std * sqrt(n): the expected norm of the privacy noise.

    The last two are claims of the device; probation (`Checks`) bounds what they can do.
    """
    spec, n = task.spec, sqrt(task.params.numel())
    steps = spec.local_epochs * spec.epoch_steps(update.num_examples)
    reach = spec.lr * spec.lr_scale * steps / max(1 - spec.momentum, 1e-3)
    model = torch.linalg.vector_norm(task.params).item()
    return max(model or n, reach * n, update.noise_std * n)
