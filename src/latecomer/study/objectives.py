"""The objective of a config: its kind, the targets it needs, and its checks before a run."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from latecomer.core.messages import TrainSpec
from latecomer.core.strategy import Strategy
from latecomer.data.dataset import Dataset, describe_target
from latecomer.data.federated_dataset import Examples, FederatedDataset, concatenate
from latecomer.device.flat import FlatModel
from latecomer.device.networks import Networks
from latecomer.device.objective import Kind, Objective, make_objective
from latecomer.errors import BadInput
from latecomer.strategies.parts.clustering import Clustering
from latecomer.strategies.parts.inversion import reason_not_to_invert
from latecomer.study.config import ObjectiveConfig
from latecomer.study.given import Given, check_reference, reference
from latecomer.study.scoring import Scoring, extra_metrics, value_of

TRIED_EXAMPLES = 8  # on which a loss is tried before the run
LARGE_TARGETS = 100.0  # standard deviation from which targets should rather be scaled


def with_references(settings: ObjectiveConfig, given: Given) -> ObjectiveConfig:
    """The settings with the names of what was given in Python, for config.toml."""
    loss = settings.loss if given.loss is None else reference(given.loss)
    metrics = (reference(function, name) for name, function in given.metrics.items())
    names = tuple(dict.fromkeys([*settings.metrics, *metrics]))
    return settings.model_copy(update={"loss": loss, "metrics": names})


def kind_of(settings: ObjectiveConfig, y: NDArray[Any], own: bool = False) -> Kind:
    """The kind of targets; with "auto" from the loss and, for a loss of one's own, the targets."""
    if settings.kind != "auto":
        return settings.kind
    one_class = y.ndim == 1 and y.dtype.kind != "f"
    if own or ":" in settings.loss:
        return "classes" if one_class else "own"
    kind = make_objective(settings.loss, 1).kind
    if kind == "classes" and y.dtype.kind == "f":
        raise BadInput(
            f"objective.loss = 'cross-entropy' needs class labels or tokens, but targets are"
            f" {describe_target(y)}; allowed for these are mse, mae, binary-cross-entropy (0 and 1)"
            " or your own as module:callable"
        )
    return "tokens" if kind == "classes" and not one_class else kind


def with_targets(dataset: Dataset, settings: ObjectiveConfig, own: bool = False) -> Dataset:
    """The dataset with the targets that the objective needs; BadInput if it has others.

    A regression takes integer labels as numbers, several labels may be integers 0 and 1.
    """
    kind, y = kind_of(settings, dataset.y, own), dataset.y
    names = dataset.class_names
    where = f"objective.loss = {settings.loss!r}"
    if kind == "regression" and y.dtype.kind != "f":
        y, names = _numbers(dataset, where), ()
    if kind == "multi-label":
        y = y.astype(np.float32)
        names = names if y.ndim == 2 else names[1:]
        y = y if y.ndim == 2 else y[:, None]
        wrong = ~np.isnan(y) & ((y < 0) | (y > 1))
        if y.ndim != 2 or wrong.any():
            found = f"{y[wrong][0]:g}" if wrong.any() else f"shape {y.shape}"
            raise BadInput(
                f"{where} needs targets of shape (n, labels) with 0, 1 and NaN for unknown; found"
                f" {found}"
            )
    if kind in ("classes", "tokens") and (
        y.dtype.kind == "f" or (y.ndim == 1) != (kind == "classes")
    ):
        raise BadInput(
            f"objective.kind = {kind!r}: targets are {describe_target(y)}; needed are"
            f" {'(n,)' if kind == 'classes' else '(n, T)'} integers"
        )
    if y is dataset.y:
        return dataset
    return replace(dataset, y=y, class_names=names, where=where)


def _numbers(dataset: Dataset, where: str) -> NDArray[np.float32]:
    """Integer targets as numbers; labels are indices into names, which must be numbers."""
    if dataset.y.ndim > 1:
        return dataset.y.astype(np.float32)
    try:
        values = np.array([float(name) for name in dataset.class_names], dtype=np.float32)
    except ValueError:
        odd = next(name for name in dataset.class_names if not _is_number(name))
        raise BadInput(
            f"{where} needs numbers as targets, but they are text, such as {odd!r}; for classes use"
            " objective.loss = 'cross-entropy'"
        ) from None
    return values[dataset.y]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def objective_of(
    settings: ObjectiveConfig, federation: FederatedDataset, given: Given
) -> Objective:
    """The objective of the config or of what was given, for these data."""
    y = federation.test.y
    kind = kind_of(settings, y.numpy(), given.loss is not None)
    if given.loss is None:
        check_reference("objective.loss", settings.loss)
    outputs = federation.num_outputs
    objective = make_objective(given.loss or settings.loss, outputs, tuple(y.shape[1:]), kind)
    return replace(objective, loss=settings.loss)


def scoring_of(
    settings: ObjectiveConfig,
    objective: Objective,
    given: Given,
    late_classes: tuple[int, ...],
    targets: Tensor,
) -> Scoring:
    """The metrics of the objective and those that the config or the caller adds."""
    references = {reference(function, name) for name, function in given.metrics.items()}
    named = [name for name in settings.metrics if name not in references]
    for name in named:
        check_reference("objective.metrics", name)
    extra = extra_metrics(named, given.metrics, objective.kind, targets)
    return Scoring(objective, late_classes, extra)


def tried(networks: Networks, parts: Sequence[Examples], scoring: Scoring) -> Scoring:
    """The scoring with its objective checked on examples, which all networks then have.

    `parts` are the training examples of devices; the first part of two or more is used.
    BadInput if a loss or metric of the user's cannot be used with the initial model.
    """
    objective, model = scoring.objective, networks.whole
    if objective.loss == "cross-entropy" and objective.classifies and not scoring.extra:
        return scoring
    enough = (part for part in parts if len(part.y) > 1)
    part = next(enough, None) or concatenate(parts)
    x, y = part.take(torch.arange(min(TRIED_EXAMPLES, len(part.y))))
    with torch.enable_grad():
        outputs = model.logits(model.init(0), x).detach().requires_grad_()
        objective = objective.check(outputs, y)
    for each in networks.models:
        each.objective = objective
    for name, function in scoring.extra.items():
        value_of(name, function, outputs.detach(), y)
    return replace(scoring, objective=objective)


def check_objective(objective: Objective, strategy: Strategy, spec: TrainSpec) -> None:
    """BadInput if the strategy or the privacy cannot work with this objective."""
    if spec.clip and not objective.per_example:
        raise BadInput(
            f"objective.loss = {objective.loss!r} gives a mean over the batch, but the gradient of"
            " each example must be clipped (privacy.where = 'step' or training.clip); let the loss"
            " give one value per example, or use privacy.where = 'update'"
        )
    if strategy.needs_classes and not objective.classifies:
        raise BadInput(
            f"strategy {strategy.name!r} compares class probabilities, but targets are of the kind"
            f" {objective.kind!r}; choose another strategy"
        )


def objective_notes(
    model: FlatModel, strategy: Strategy, prior: bool, train: Iterable[Examples]
) -> Iterable[str]:
    """One sentence for each part of a strategy or setting that has no use with this objective."""
    name, objective = strategy.name, model.objective
    if strategy.inverts and (reason := reason_not_to_invert(model)):
        yield f"{name}: late updates are not compensated, because {reason}"
    if not objective.per_example:
        yield (
            f"objective.loss = {objective.loss!r} gives a mean over the batch: devices are trained"
            " one by one; one value per example is faster"
        )
    if objective.classifies:
        return
    if isinstance(strategy.route, Clustering):
        yield f"{name}: clusters form by distances and losses alone, because targets are no classes"
    if prior:
        yield "personalise.prior has no effect: targets are no classes"
    if objective.kind == "regression":
        known = torch.cat([part.y.reshape(-1) for part in train])
        spread = known[~known.isnan()].std().item()
        if spread > LARGE_TARGETS:
            yield (
                f"targets have a standard deviation of {spread:.3g}: training may diverge; scale"
                " them to about 1"
            )
