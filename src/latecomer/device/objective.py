"""The objective of training: the loss of each example, and the shapes of targets and outputs.

| kind | targets | outputs of the network | built-in losses |
|---|---|---|---|
| classes | (n,) int64 | (n, K) logits | cross-entropy |
| tokens | (n, T) int64, negative = missing | (n, T, V) logits | cross-entropy |
| multi-label | (n, K) of 0 and 1, NaN = missing | (n, K) logits | binary-cross-entropy |
| regression | (n,) or (n, K) numbers, NaN = missing | the same | mse, mae |
| own | any | any | none: the loss is the user's |

The loss of an example is the mean over its known targets, 0 if it has none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from latecomer.errors import BadInput, unknown
from latecomer.loading import first_line, load_callable

Kind = Literal["classes", "tokens", "multi-label", "regression", "own"]
LossFunction = Callable[[Tensor, Tensor], Tensor]

# The kinds of targets that each built-in loss is for.
LOSSES: dict[str, tuple[Kind, ...]] = {
    "cross-entropy": ("classes", "tokens"),
    "binary-cross-entropy": ("multi-label",),
    "mse": ("regression",),
    "mae": ("regression",),
}


@dataclass(frozen=True)
class Objective:
    """A loss and the kind of targets it is computed from.

    outputs: numbers that the network gives per example (per token): classes, labels or columns.
    target_shape: shape of the targets of one example; () for one number or label.
    function: the user's loss(outputs, targets); None for the built-in loss called `loss`.
    per_example: whether the loss gives one value per example. A loss that gives a mean over the
        batch cannot be weighted or clipped per example.
    """

    loss: str
    kind: Kind
    outputs: int
    target_shape: tuple[int, ...] = ()
    function: LossFunction | None = None
    per_example: bool = True

    def __post_init__(self) -> None:
        if self.function is None and self.kind not in LOSSES.get(self.loss, ()):
            raise unknown("objective.loss", self.loss, LOSSES, "your own as module:callable")

    @property
    def classifies(self) -> bool:
        """Whether each example has one class, and the network gives a logit for each class."""
        return self.kind == "classes"

    @property
    def target_dtype(self) -> torch.dtype:
        return torch.int64 if self.kind in ("classes", "tokens") else torch.float32

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each example, shape (n,).

        A user's loss that gives a mean is called for each example alone.
        """
        if self.function is not None:
            if self.per_example:
                return self.function(outputs, targets)
            each = zip(torch.split(outputs, 1), torch.split(targets, 1), strict=True)
            return torch.stack([self.function(*one).reshape(()) for one in each])
        if self.kind == "classes":
            return F.cross_entropy(outputs, targets, reduction="none")
        known = self.known(targets)
        if self.kind == "tokens":
            each_token = F.cross_entropy(
                outputs.movedim(-1, 1), targets.clamp_min(0), reduction="none"
            )
            return _mean_of_known(each_token, known)
        filled = torch.where(known, targets, 0.0)
        outputs = outputs.reshape(targets.shape)
        if self.kind == "multi-label":
            values = F.binary_cross_entropy_with_logits(outputs, filled, reduction="none")
        else:
            difference = outputs - filled
            values = difference.square() if self.loss == "mse" else difference.abs()
        return _mean_of_known(values, known)

    def mean(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """The mean loss of the examples, weighted by `weights`; 0 if these are all 0."""
        if weights is not None:
            each, weights = self.losses(outputs, targets), weights.to(outputs.dtype)
            total = weights.sum()
            return (each * weights).sum() / (total + (total == 0))
        if self.function is not None:
            found = self.function(outputs, targets)
            return found.mean() if self.per_example else found.reshape(())
        if self.kind == "classes":
            return F.cross_entropy(outputs, targets)
        return self.losses(outputs, targets).mean()

    def sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The sum of the losses of the examples."""
        if self.function is None and self.kind == "classes":
            return F.cross_entropy(outputs, targets, reduction="sum")
        return self.losses(outputs, targets).sum()

    def known(self, targets: Tensor) -> Tensor:
        """Whether each target is known: no negative token, no NaN."""
        return ~targets.isnan() if targets.is_floating_point() else targets >= 0

    def accepts(self, shape: tuple[int, ...], n: int) -> bool:
        """Whether outputs for n examples may have this shape; a vocabulary may be larger."""
        allowed = self.output_shapes(n)
        if self.kind == "tokens" and shape[:-1] == allowed[0][:-1]:
            return shape[-1] >= self.outputs
        return shape in allowed or not allowed

    def output_shapes(self, n: int) -> tuple[tuple[int, ...], ...]:
        """The shapes that the outputs for n examples may have; empty if any is allowed."""
        if self.kind == "own":
            return ()
        if self.kind == "classes":
            return ((n, self.outputs),)
        if self.kind == "tokens":
            return ((n, *self.target_shape, self.outputs),)
        one = ((n, 1),) if not self.target_shape else ()
        return ((n, *self.target_shape), *one)

    @property
    def wanted_outputs(self) -> str:
        """The outputs that a network must give, in words."""
        if self.kind == "own":
            return "a tensor"
        what = "numbers" if self.kind == "regression" else "logits"
        more = " or more tokens" if self.kind == "tokens" else ""
        shapes = (", ".join(["n", *map(str, shape[1:])]) for shape in self.output_shapes(2))
        return f"{what} of shape " + " or ".join(
            "(n,)" if shape == "n" else f"({shape}{more})" for shape in shapes
        )

    def placeholder(self, *batch: int) -> Tensor:
        """Targets of shape (*batch, *target_shape) that are all 0, to try a network out."""
        return torch.zeros(*batch, *self.target_shape, dtype=self.target_dtype)

    def check(self, outputs: Tensor, targets: Tensor) -> "Objective":
        """This objective, with `per_example` as the user's loss has it; BadInput if it is unusable.

        `outputs` are those of an initial network for the examples that have `targets`, at least
        two of them, and depend on its parameters.
        """
        name = f"objective.loss {self.loss!r}"
        if isinstance(self.function, type):
            raise BadInput(
                f"{name}: is a class; give an instance, such as {self.function.__name__}(), or a"
                " function (outputs, targets)"
            )
        try:
            value = (self.function or self.losses)(outputs, targets)
        except Exception as error:  # a user's loss may raise anything
            shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
            raise BadInput(
                f"{name}: calling it failed with {shapes}: {first_line(error)}"
            ) from error
        n, allowed = len(targets), f"a tensor of shape () or ({len(targets)},)"
        if not isinstance(value, Tensor):
            raise BadInput(f"{name}: gave a {type(value).__name__}; it must give {allowed}")
        if value.shape not in ((), (1,), (n,)):
            raise BadInput(f"{name}: gave shape {tuple(value.shape)}; it must give {allowed}")
        if not value.isfinite().all():
            kind = "NaN" if value.isnan().any() else "infinity"
            raise BadInput(
                f"{name}: gives {kind} for the initial model on the first {n} examples; it must be"
                " finite: look for a logarithm of 0 or a division by 0 in it, and for NaN in the"
                " targets"
            )
        if not value.requires_grad:
            raise BadInput(
                f"{name}: gave a value that does not depend on the network; compute it from the"
                " outputs with torch operations, without item(), detach() or numpy"
            )
        return replace(self, per_example=value.shape == (n,))


def classification(num_classes: int) -> Objective:
    """Cross-entropy over `num_classes` classes."""
    return Objective("cross-entropy", "classes", num_classes)


def make_objective(
    loss: str | LossFunction,
    outputs: int,
    target_shape: Sequence[int] = (),
    kind: Kind | Literal["auto"] = "auto",
) -> Objective:
    """The objective with a built-in loss, a user's as `module:callable`, or a function.

    With kind "auto" a built-in loss sets it; cross-entropy on targets of shape (T,) is for tokens.
    A user's loss has the kind "own" unless another is given.
    """
    shape = tuple(target_shape)
    if callable(loss):
        name = getattr(loss, "__name__", type(loss).__name__)
        return Objective(name, "own" if kind == "auto" else kind, outputs, shape, loss)
    if ":" in loss:
        function = load_callable(loss, "objective.loss")
        return Objective(loss, "own" if kind == "auto" else kind, outputs, shape, function)
    if loss not in LOSSES:
        raise unknown("objective.loss", loss, LOSSES, "your own as module:callable")
    fitting = LOSSES[loss]
    if kind == "auto":
        kind = fitting[-1] if loss == "cross-entropy" and shape else fitting[0]
    if kind not in fitting:
        raise BadInput(
            f"objective.kind = {kind!r}: {loss} is for {' or '.join(fitting)};"
            " leave it at 'auto' with a built-in loss"
        )
    return Objective(loss, kind, outputs, shape)


def _mean_of_known(values: Tensor, known: Tensor) -> Tensor:
    """The mean over all axes but the first, of the known values; 0 where none is known."""
    if values.dim() == 1:
        return torch.where(known, values, 0.0)
    values, known = torch.where(known, values, 0.0).flatten(1), known.flatten(1)
    return values.sum(1) / known.sum(1).clamp_min(1)
