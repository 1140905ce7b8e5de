"""Names of metrics: those of each kind of objective, how they are written, which way is better."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from latecomer.errors import BadInput

if TYPE_CHECKING:  # it imports torch, which reading results does not need
    from latecomer.device.objective import Kind

# The built-in metrics of each kind, beside the loss.
METRICS: "dict[Kind, tuple[str, ...]]" = {
    "classes": ("accuracy", "balanced_accuracy", "macro_f1", "accuracy_affected"),
    "multi-label": ("macro_f1", "mean_average_precision", "balanced_accuracy"),
    "regression": ("mae", "rmse", "r2"),
    "tokens": ("perplexity", "token_accuracy"),
    "own": (),
}
# The metric of terminal lines, targets and local tests.
MAIN: "dict[Kind, str]" = {
    "classes": "accuracy",
    "multi-label": "macro_f1",
    "regression": "rmse",
    "tokens": "perplexity",
    "own": "loss",
}
LOWER_IS_BETTER = frozenset({"loss", "mae", "rmse", "perplexity"})
# Metrics between 0 and 1, and how they are written.
SHARES = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro-F1",
    "accuracy_affected": "late-class accuracy",
    "mean_average_precision": "mean average precision",
    "token_accuracy": "token accuracy",
}
NUMBERS = {"mae": "MAE", "rmse": "RMSE", "r2": "R2"}
# Columns of metrics.csv that are no metrics of the central test set.
OTHER_COLUMNS = ("updates", "version", "virtual_seconds", "wall_seconds")
OTHER_PREFIXES = ("f1_", "client_", "train_", "validation_")
NODES = "client_nodes"  # devices whose metrics are in the client_ columns of a row


@dataclass(frozen=True)
class MainMetric:
    """The metric by which runs are compared and devices are tested."""

    name: str = "accuracy"
    lower_is_better: bool = False

    @property
    def label(self) -> str:
        return label_of(self.name)

    def reached(self, values: Any, target: float) -> Any:
        """Whether values (a number or a column) are as good as the target."""
        return values <= target if self.lower_is_better else values >= target


def main_metric(summary: Mapping[str, Any]) -> MainMetric:
    """The main metric of a run: accuracy unless its summary names another."""
    objective = summary.get("objective")
    if not objective:
        return MainMetric()
    return MainMetric(str(objective["metric"]), bool(objective["lower_is_better"]))


def need_accuracy(summary: Mapping[str, Any], what: str) -> None:
    """BadInput if `what` reads accuracies and the run, of which this is the summary, has none."""
    if objective := summary.get("objective"):
        raise BadInput(
            f"{what} reads accuracies, which objective.loss = {objective['loss']!r} does not have;"
            " compare strategies with `latecomer compare`"
        )


def score_text(summary: Mapping[str, Any]) -> str:
    """Name and value of a run's main metric."""
    main = main_metric(summary)
    return f"{main.label} {number_text(main.name, summary[main.name])}"


def label_of(name: str) -> str:
    """A metric as it is written in tables and charts."""
    return SHARES.get(name) or NUMBERS.get(name) or name


def number_text(name: str, value: float | None) -> str:
    """The value with three decimals for shares and four digits for others; "-" if unknown."""
    if value is None or value != value:
        return "-"
    return f"{value:.3f}" if name in SHARES else f"{value:.4g}"


def metric_columns(columns: Iterable[object]) -> list[str]:
    """The metrics of the central test set among the columns of metrics.csv: shares, then numbers.

    Where there is an accuracy, the loss is left out. If the server of a deployed run has no test
    set, the columns of metrics on devices are returned.
    """
    names = [str(name) for name in columns]
    shares = [name for name in SHARES if name in names]
    others = [
        name
        for name in names
        if name not in (*SHARES, *OTHER_COLUMNS) and not name.startswith(OTHER_PREFIXES)
    ]
    found = shares + [name for name in others if name != "loss" or "accuracy" not in shares]
    return found or device_columns(names)


def device_columns(columns: Iterable[object]) -> list[str]:
    """The metrics of a model on devices among the columns of metrics.csv of a deployed run."""
    names = [str(name) for name in columns]
    return [name for name in names if name.startswith("client_") and name != NODES]
