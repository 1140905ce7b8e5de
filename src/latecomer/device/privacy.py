"""Local differential privacy: clipping, noise and the charge to the ledger for each task.

Cheng, Xue and Zhu (PrivaAsyncFed), section III.C, plus composition, which the paper leaves out.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, log, pi, sqrt
from typing import Literal

import torch
from torch import Tensor
from torch.linalg import vector_norm

from latecomer.core.messages import TrainSpec
from latecomer.device.ledger import Accountant, Kind, Ledger, Release, Unit
from latecomer.device.training import Hook, Plan, mixed, plan_batches, shuffled_passes
from latecomer.errors import BadInput

NOISE_STREAM = 2  # random stream of noise, beside BATCH_STREAM
MAX_EPSILON = 1e9  # reported instead of infinity

Where = Literal["step", "update"]
Sampling = Literal["shuffle", "poisson"]
Denominator = Literal["batch", "dataset"]


def per_release_multiplier(epsilon: float, delta: float, kind: Kind = "gaussian") -> float:
    """The paper's noise multiplier for one (epsilon, delta) release; Laplace ignores delta.

    The Gaussian formula is proven for epsilon up to 1 only; the ledger accounts exactly.
    """
    if not epsilon > 0:
        raise BadInput(f"epsilon = {epsilon}: allowed is above 0")
    return (sqrt(2 * log(1.25 / delta)) if kind == "gaussian" else 1.0) / epsilon  # Eq. 25


@dataclass(frozen=True, slots=True)
class Privacy:
    """The privacy mechanism of a device: what it clips and noises, and what a task is charged.

    where = "step": example-level privacy. Per-example gradients are clipped, which the task's spec
    must ask for (`clip`, in the norm `norm`), and every averaged gradient is noised.
    where = "update": device-level privacy. The finished delta is clipped and noised once.

    sampling = "shuffle": neighbouring datasets differ by one replaced example. An example is in
    one batch of a pass, so a pass is one release: its other steps are post-processing.
    sampling = "poisson": neighbouring datasets differ by one example of gradient zero; the number
    of examples is public. Each step samples every example independently, and is one release.

    `denominator` divides the noise of a step: "batch", like its sensitivity, or "dataset", as in
    the paper's Delta f. The latter is too little noise unless a batch is the whole dataset; the
    ledger charges the larger epsilon.

    `budget` is the largest epsilon of the ledger at `delta`; 0 is no bound.
    """

    kind: Kind
    multiplier: float
    clip: float
    delta: float
    where: Where = "step"
    sampling: Sampling = "shuffle"
    denominator: Denominator = "batch"
    budget: float = 0.0
    accountant: Accountant = "pld"

    def __post_init__(self) -> None:
        if not 0 < self.clip < inf:
            raise BadInput(f"privacy.clip = {self.clip}: allowed is above 0, finite")
        if not 0 <= self.multiplier < inf:
            raise BadInput(f"noise multiplier = {self.multiplier}: allowed is 0 or more, finite")
        if not 0 < self.delta < 1:
            raise BadInput(f"privacy.delta = {self.delta}: allowed is above 0 and below 1")
        if not self.budget >= 0:
            raise BadInput(f"privacy.budget = {self.budget}: allowed is 0 (none) or more")
        if self.denominator == "dataset" and (self.where, self.sampling) != ("step", "shuffle"):
            raise BadInput(
                "privacy.denominator = 'dataset' is for where = 'step' with sampling = 'shuffle'"
            )
        if self.where == "update" and self.sampling == "poisson":
            raise BadInput("sampling = 'poisson' gains nothing with where = 'update': use shuffle")

    @property
    def norm(self) -> int:
        """The norm in which gradients or deltas are clipped."""
        return 1 if self.kind == "laplace" else 2

    @property
    def unit(self) -> Unit:
        """The unit of the ledger's releases."""
        if self.where == "update":
            return "update"
        return "sampled step" if self.sampling == "poisson" else "step"

    def release(self, n: int, spec: TrainSpec) -> Release:
        """The release that a device with n examples is charged, `releases` times per task."""
        if self.sampling == "poisson":
            return Release(self.kind, self.multiplier, _expected(n, spec) / n)
        if self.where == "step" and self.denominator == "dataset":
            # Relative to the sensitivity in the smallest batch that an example may be in.
            width = _expected(n, spec)
            return Release(self.kind, self.multiplier * (n % width or width) / n)
        return Release(self.kind, self.multiplier)

    def releases(self, n: int, spec: TrainSpec) -> int:
        """The number of releases of one task."""
        if self.where == "update":
            return 1
        return _steps(n, spec) if self.sampling == "poisson" else shuffled_passes(n, spec)

    def may_release(self, ledger: Ledger, n: int, spec: TrainSpec) -> bool:
        """Whether one more task fits the budget."""
        if not self.budget:
            return True
        release, count = self.release(n, spec), self.releases(n, spec)
        return ledger.affords(release, count, self.budget, self.delta, self.accountant)

    def enforced(self, spec: TrainSpec) -> TrainSpec:
        """The spec with this device's clipping bound in place of the task's."""
        if self.where == "update":
            return spec
        return replace(spec, clip=self.clip, clip_norm=self.norm)

    def epsilon(self, ledger: Ledger) -> float:
        """The epsilon of the ledger, at most `MAX_EPSILON`."""
        return min(ledger.epsilon(self.delta, self.accountant), MAX_EPSILON)

    def charge(self, ledger: Ledger, n: int, spec: TrainSpec) -> None:
        """Add the releases of one task to the ledger."""
        ledger.charge(self.release(n, spec), self.releases(n, spec))

    def plan(self, n: int, spec: TrainSpec, rng: torch.Generator) -> Plan:
        """The mini-batches of a task."""
        return (poisson_plan if self.sampling == "poisson" else plan_batches)(n, spec, rng)

    def on_gradient(
        self, sizes: Sequence[int], n: int, spec: TrainSpec, rng: torch.Generator | None
    ) -> Hook | None:
        """The hook of `local_update` that noises each step's gradient; None if none is noised.

        `sizes` are the numbers of real examples of the plan's steps. The hook draws from `rng`
        step by step, so it serves one run of the task.
        """
        if self.where == "update":
            return None
        scales = self.scales(sizes, n, spec)

        def noised(gradient: Tensor, step: int) -> Tensor:
            if self.sampling == "poisson":
                # The sum over the expected batch size, which does not depend on the examples.
                share = sizes[step] / _expected(n, spec)
                gradient = gradient * share if share else torch.zeros_like(gradient)
            if not scales[step]:
                return gradient
            return gradient + scales[step] * unit_noise(self.kind, gradient, rng)

        return noised

    def scales(self, sizes: Sequence[int], n: int, spec: TrainSpec) -> list[float]:
        """The scale of the noise in each step; 0 in empty steps of a shuffled plan.

        Multiplier times sensitivity: 2C/|D| for a batch of the whole dataset. Eqs. 21-24.
        """
        if self.sampling == "poisson":
            return [self.multiplier * self.clip / _expected(n, spec)] * len(sizes)
        return [
            self.multiplier * 2 * self.clip / (n if self.denominator == "dataset" else b)  # Eq. 23
            if b
            else 0.0
            for b in sizes
        ]

    def noised_update(self, delta: Tensor, rng: torch.Generator | None) -> Tensor:
        """The delta clipped and noised with where = "update"; unchanged with "step"."""
        if self.where == "step":
            return delta
        size = vector_norm(delta, ord=self.norm).item()
        # A delta that is not finite would be visible through the noise.
        bounded = delta * min(1.0, self.clip / max(size, 1e-30)) if isfinite(size) else 0.0
        return unit_noise(self.kind, delta, rng) * (self.multiplier * 2 * self.clip) + bounded

    def noise_std(self, n: int, sizes: Sequence[int], spec: TrainSpec) -> float:
        """The standard deviation of the noise in one trained coordinate of the delta.

        Ignores how noise changes later gradients, weight decay and prox. 0.0, unknown, for
        Adam, which rescales the noise.
        """
        unit = sqrt(2.0) if self.kind == "laplace" else 1.0
        if self.where == "update":
            return unit * self.multiplier * 2 * self.clip
        if spec.optimizer != "sgd":
            return 0.0
        total = repeated = 0.0
        for scale in filter(None, reversed(self.scales(sizes, n, spec))):
            repeated = 1 + spec.momentum * repeated  # weight of this step's noise by momentum
            total += (scale * repeated) ** 2
        return unit * spec.lr * spec.lr_scale * sqrt(total)


def noise_rng(seed: int, device: int, number: int) -> torch.Generator:
    """The generator of a simulated task's noise, independent of that of its batches."""
    return torch.Generator().manual_seed(mixed(seed, NOISE_STREAM, device, number))


def system_rng() -> torch.Generator:
    """A generator with a seed of the operating system: no two of them repeat each other."""
    return torch.Generator().manual_seed(int.from_bytes(os.urandom(8), "little"))


def _system_uniform(like: Tensor) -> Tensor:
    """Values in (0, 1] of the operating system's randomness, float64, in the shape of `like`."""
    bits = torch.frombuffer(bytearray(os.urandom(8 * like.numel())), dtype=torch.int64)
    return ((bits >> 11) & (2**53 - 1)).double().add_(0.5).mul_(2.0**-53).view(like.shape)


def unit_noise(kind: Kind, like: Tensor, rng: torch.Generator | None) -> Tensor:
    """Noise in the shape of `like`, of standard deviation 1 or Laplace scale 1.

    With `rng` None it is drawn from the operating system, so nothing that is stored can repeat it.
    """
    if rng is None:
        one, two = _system_uniform(like), _system_uniform(like)
        if kind == "gaussian":  # Box and Muller 1958
            return (one.log() * -2).sqrt().mul(two.mul(2 * pi).cos()).to(like.dtype)
        return (two.log() - one.log()).to(like.dtype)
    if kind == "gaussian":
        return torch.empty_like(like).normal_(generator=rng)
    # The difference of two exponentials is Laplace, and never infinite as a logarithm may be.
    draw = torch.empty_like(like).exponential_(generator=rng)
    return draw - torch.empty_like(like).exponential_(generator=rng)


def poisson_plan(n: int, spec: TrainSpec, rng: torch.Generator) -> Plan:
    """Poisson sampling: as many steps as shuffled passes have, examples drawn independently.

    The sampling rate gives batches of `batch_size` examples on average.
    """
    if n < 1:
        raise BadInput("a device needs at least one example to train on")
    draws = torch.rand(_steps(n, spec), n, dtype=torch.float64, generator=rng)
    chosen = draws < _expected(n, spec) / n
    sizes = chosen.sum(1, keepdim=True)
    width = max(1, int(sizes.max()))
    mask = torch.arange(width) < sizes
    order = chosen.int().argsort(dim=1, descending=True, stable=True)[:, :width]
    return Plan(order * mask, mask.float())


def _expected(n: int, spec: TrainSpec) -> int:
    """The expected size of a sampled batch, and the size of a shuffled one."""
    return min(spec.batch_size, n)


def _steps(n: int, spec: TrainSpec) -> int:
    return spec.local_epochs * spec.epoch_steps(n)
