"""What is measured with an objective: the columns of metrics.csv and how they are computed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from latecomer.device.objective import Kind, Objective
from latecomer.errors import BadInput, unknown
from latecomer.loading import first_line, load_callable
from latecomer.study.metric_names import LOWER_IS_BETTER, MAIN, METRICS
from latecomer.study.metrics import (
    Metric,
    Scores,
    class_scores,
    confusion,
    label_scores,
    number_scores,
    token_scores,
)

Parts = Iterable[tuple[Tensor, Tensor]]  # outputs and targets, batch by batch


@dataclass(frozen=True)
class Scoring:
    """The metrics of an objective; `extra` are the user's own and further built-in ones."""

    objective: Objective
    late_classes: tuple[int, ...] = ()
    extra: Mapping[str, Metric] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the scores, the loss first."""
        return ("loss", *METRICS[self.objective.kind], *self.extra)

    @property
    def main(self) -> str:
        """The metric by which runs are compared and devices are tested."""
        objective = self.objective
        return "mae" if objective.loss == "mae" else MAIN[objective.kind]

    @property
    def lower_is_better(self) -> bool:
        """Whether a smaller value of the main metric is better."""
        return self.main in LOWER_IS_BETTER

    @property
    def stopping(self) -> str:
        """The metric that early stopping watches on the validation parts."""
        return "macro_f1" if self.objective.classifies else self.main

    @property
    def local_further(self) -> tuple[str, ...]:
        """Local test scores beside the main metric."""
        return ("balanced_accuracy", "macro_f1") if self.objective.classifies else ()

    def scores(self, parts: Parts, count_loss: bool = True) -> Scores:
        """The scores of outputs, which come with their targets batch by batch.

        Without `count_loss` the loss is 0, where it is not used and classes need none.
        """
        objective = self.objective
        if objective.kind == "tokens" and not self.extra:
            return self._token_scores(parts)
        outputs, targets = (torch.cat(some) for some in zip(*parts, strict=True))
        if objective.classifies:
            loss = objective.mean(outputs, targets).item() if count_loss else 0.0
            counts = confusion(targets, outputs.argmax(1), objective.outputs)
            found = class_scores(counts, loss, self.late_classes)
        else:
            found = _with_loss(self._built_in(outputs, targets), self._loss(outputs, targets))
        more = {name: value_of(name, f, outputs, targets) for name, f in self.extra.items()}
        return Scores({**found.values, **more}, found.f1)

    def average(self, found: Sequence[tuple[Scores, float]]) -> Scores:
        """The mean of every score, weighted; None where one is None."""
        total = sum(weight for _, weight in found)

        def mean(values: Iterable[float | None]) -> float | None:
            pairs = list(zip(values, (weight for _, weight in found), strict=True))
            known = [(value, weight) for value, weight in pairs if value is not None]
            if len(known) < len(pairs):
                return None
            return sum(value * weight for value, weight in known) / total

        each = [scores for scores, _ in found]
        values = {name: mean(scores[name] for scores in each) for name in self.columns}
        return Scores(values, tuple(map(mean, zip(*(s.f1 for s in each), strict=True))))

    def _built_in(self, outputs: Tensor, targets: Tensor) -> Scores:
        match self.objective.kind:
            case "multi-label":
                return label_scores(outputs, targets)
            case "regression":
                return number_scores(outputs, targets)
            case "tokens":
                return token_scores([(outputs, targets)])
        return Scores({})

    def _token_scores(self, parts: Parts) -> Scores:
        losses: list[Tensor] = []

        def counted() -> Parts:
            for outputs, targets in parts:
                known = self.objective.known(targets).flatten(1).any(1)
                losses.append(self.objective.losses(outputs, targets)[known].double())
                yield outputs, targets

        found = token_scores(counted())
        return _with_loss(found, torch.cat(losses).mean().item())

    def _loss(self, outputs: Tensor, targets: Tensor) -> float:
        """The mean loss of the examples; those without any known target are left out."""
        objective = self.objective
        if not objective.per_example:
            return objective.mean(outputs, targets).item()
        each = objective.losses(outputs, targets).double()
        if objective.kind != "own":
            each = each[objective.known(targets).reshape(len(each), -1).any(1)]
        return each.mean().item()


def _with_loss(found: Scores, loss: float) -> Scores:
    return Scores({"loss": loss, **found.values}, found.f1)


def value_of(name: str, function: Metric, outputs: Tensor, targets: Tensor) -> float | None:
    """The value of a metric; BadInput if it fails or is no number."""
    try:
        value = function(outputs, targets)
        return None if value is None else float(value)
    except Exception as error:  # a user's function may raise anything
        raise BadInput(f"objective.metrics {name!r}: calling it failed: {first_line(error)}") from (
            error
        )


def extra_metrics(
    asked: Sequence[str], given: Mapping[str, Metric], kind: Kind, targets: Tensor
) -> dict[str, Metric]:
    """The metrics named in the config and those given as functions, by column name.

    Names of built-in metrics that the objective has anyway are left out.
    """
    fitting = _fitting(kind, targets)
    known = METRICS[kind]
    found: dict[str, Metric] = {}
    for name in asked:
        if ":" in name:
            found[name.partition(":")[2]] = load_callable(name, "objective.metrics")
        elif name in fitting:
            found |= {name: fitting[name]} if name not in known else {}
        elif any(name in names for names in METRICS.values()):
            allowed = ", ".join([*fitting, "your own as module:callable"])
            raise BadInput(
                f"objective.metrics: {name!r} is not for {kind} targets of shape"
                f" ({', '.join(['n', *map(str, targets.shape[1:])])}) (allowed: {allowed})"
            )
        else:
            raise unknown("objective.metrics", name, fitting, "your own as module:callable")
    for name, function in given.items():
        if not callable(function):
            raise BadInput(f"metrics: {name!r} is a {type(function).__name__}; it must be callable")
        found[name] = function
    for name in found:
        if name in ("loss", "f1", *known) or name.startswith(("f1_", "client_", "validation_")):
            raise BadInput(f"objective.metrics: {name!r} is a column already; name it otherwise")
    return found


def _fitting(kind: Kind, targets: Tensor) -> dict[str, Metric]:
    """The built-in metrics that can be computed for these targets, as functions."""
    if kind == "own":
        if not targets.is_floating_point():
            kinds: tuple[Kind, ...] = ("classes",) if targets.dim() == 1 else ("tokens",)
        else:
            kinds = ("regression", "multi-label") if targets.dim() == 2 else ("regression",)
    else:
        kinds = (kind,)
    functions: dict[Kind, Callable[[Tensor, Tensor], Scores]] = {
        "classes": _class_scores,
        "multi-label": label_scores,
        "regression": number_scores,
        "tokens": lambda outputs, targets: token_scores([(outputs, targets)]),
    }
    return {
        name: partial(_one, functions[each], name)
        for each in kinds
        for name in METRICS[each]
        if name != "accuracy_affected"
    }


def _class_scores(outputs: Tensor, targets: Tensor) -> Scores:
    classes = outputs.shape[1]
    return class_scores(confusion(targets, outputs.argmax(1), classes), 0.0)


def _one(
    function: Callable[[Tensor, Tensor], Scores], name: str, outputs: Tensor, targets: Tensor
) -> float | None:
    return function(outputs, targets)[name]
