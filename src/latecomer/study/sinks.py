"""Writes the metrics of a run to local files of TensorBoard, MLflow or Weights & Biases.

A sink that raises is dropped with a warning in the summary; the run goes on.
"""

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from latecomer.errors import BadInput
from latecomer.loading import first_line

Tree = Mapping[str, Any]
Row = Mapping[str, float]


class Sink(Protocol):
    """Receives the metrics of each evaluation and, at the end, the scalars of the summary."""

    def row(self, updates: int, row: Row) -> None: ...
    def end(self, summary: Row) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """DIR/tensorboard, for `tensorboard --logdir`."""

    def __init__(self, folder: Path, config: str, tree: Tree, updates: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hides what an interrupted run wrote after its checkpoint.
        make: Any = SummaryWriter
        purge = updates + 1 if updates else None
        self._writer = make(log_dir=str(folder / "tensorboard"), purge_step=purge)
        if not updates:
            self._writer.add_text("config", f"```toml\n{config}\n```")

    def row(self, updates: int, row: Row) -> None:
        for name, value in row.items():
            self._writer.add_scalar(_tag(name), value, updates)

    def end(self, summary: Row) -> None:
        for name, value in summary.items():
            self._writer.add_scalar(f"summary/{name}", value, 0)

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """DIR/mlruns, a local file store, for `mlflow ui --backend-store-uri`."""

    def __init__(self, folder: Path, config: str, tree: Tree, updates: int) -> None:
        # Newer versions use a database unless this variable allows files.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client: Any = MlflowClient(tracking_uri=(folder / "mlruns").resolve().as_uri())
        found = self._client.get_experiment_by_name("latecomer")
        where = found.experiment_id if found else self._client.create_experiment("latecomer")
        runs = self._client.search_runs([where])
        if runs:  # the run is resumed
            self._run = runs[0].info.run_id
            return
        self._run = self._client.create_run(where, run_name=folder.name).info.run_id
        flat = pd.json_normalize(dict(tree)).iloc[0]
        params = [Param(str(key), str(value)[:6000]) for key, value in flat.items()]
        self._client.log_batch(self._run, params=params[:100])

    def row(self, updates: int, row: Row) -> None:
        self._log(row, updates)

    def end(self, summary: Row) -> None:
        self._log({f"summary.{name}": value for name, value in summary.items()}, 0)
        self._client.set_terminated(self._run)

    def close(self) -> None: ...

    def _log(self, row: Row, step: int) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(_safe(name), value, now, step) for name, value in row.items()]
        for start in range(0, len(metrics), 1000):
            self._client.log_batch(self._run, metrics=metrics[start : start + 1000])


class WeightsAndBiases:
    """DIR/wandb, offline; `wandb sync` uploads it."""

    def __init__(self, folder: Path, config: str, tree: Tree, updates: int) -> None:
        import wandb

        (folder / "wandb").mkdir(exist_ok=True)
        name = folder / "wandb" / "latecomer-id"
        if not name.is_file():
            name.write_text(uuid.uuid4().hex[:12])
        self._run: Any = wandb.init(
            mode="offline",
            dir=str(folder),
            project="latecomer",
            id=name.read_text().strip(),
            name=folder.name,
            config=dict(tree),
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )

    def row(self, updates: int, row: Row) -> None:
        self._run.log(dict(row), step=updates)

    def end(self, summary: Row) -> None:
        self._run.summary.update({f"final/{name}": value for name, value in summary.items()})

    def close(self) -> None:
        self._run.finish()


# name -> package that must be installed, factory
SINKS: dict[str, tuple[str, Callable[[Path, str, Tree, int], Sink]]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "mlflow": ("mlflow", MLflow),
    "wandb": ("wandb", WeightsAndBiases),
}


def check_sinks(names: Sequence[str]) -> None:
    """Raises BadInput if the package of a sink is not installed."""
    for name in names:
        if find_spec(SINKS[name][0]) is None:
            raise BadInput(
                f"log.sinks: {name} needs the package {SINKS[name][0]}, which is not installed:"
                f' pip install "latecomer[{name}]"'
            )


class Sinks:
    """All sinks of a run; one that raises is dropped and described in `troubles`."""

    def __init__(self) -> None:
        self.troubles: list[str] = []
        self._open: dict[str, Sink] = {}

    def open(
        self, names: Sequence[str], folder: Path, config: str, tree: Tree, updates: int
    ) -> None:
        for name in names:
            make = SINKS[name][1]
            try:
                self._open[name] = make(folder, config, tree, updates)
            except Exception as error:  # third-party packages may raise anything
                self._drop(name, error)

    def row(self, row: Mapping[str, Any]) -> None:
        numbers = _numbers(row)
        self._each(lambda sink: sink.row(int(row["updates"]), numbers))

    def end(self, summary: Mapping[str, Any]) -> None:
        numbers = _numbers(summary)
        self._each(lambda sink: sink.end(numbers))

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._open.clear()

    def _each(self, use: Callable[[Sink], None]) -> None:
        for name, sink in list(self._open.items()):
            try:
                use(sink)
            except Exception as error:
                self._drop(name, error)

    def _drop(self, name: str, error: Exception) -> None:
        self._open.pop(name, None)
        self.troubles.append(f"log.sinks: {name} failed and was switched off: {first_line(error)}")


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _tag(name: str) -> str:
    """TensorBoard's tag; F1 of the classes in one group."""
    return f"f1/{name.removeprefix('f1_')}" if name.startswith("f1_") else name


def _safe(name: str) -> str:
    """A metric name as MLflow allows: other characters become `_`."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)
