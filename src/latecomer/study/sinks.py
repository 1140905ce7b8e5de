"""Where else the numbers of a run go: TensorBoard, MLflow, Weights & Biases. All stays on disk.

A sink that fails does not take the run with it: it is closed, and the summary says so.
"""

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from latecomer.errors import BadInput
from latecomer.loading import first_line

Tree = Mapping[str, Any]
Row = Mapping[str, float]  # only what is a number


class Sink(Protocol):
    """Takes the row of each evaluation, and the scalars of the summary."""

    def row(self, updates: int, row: Row) -> None: ...
    def end(self, summary: Row) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """DIR/tensorboard, for `tensorboard --logdir`."""

    def __init__(self, folder: Path, config: str, tree: Tree, updates: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What an interrupted run wrote past its checkpoint is hidden.
        make: Any = SummaryWriter
        purge = updates + 1 if updates else None
        self._writer = make(log_dir=str(folder / "tensorboard"), purge_step=purge)
        if not updates:
            self._writer.add_text("config", f"```toml\n{config}\n```")

    def row(self, updates: int, row: Row) -> None:
        for name, value in row.items():
            self._writer.add_scalar(_place(name), value, updates)

    def end(self, summary: Row) -> None:
        for name, value in summary.items():
            self._writer.add_scalar(f"summary/{name}", value, 0)

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """DIR/mlruns, a local file store, for `mlflow ui --backend-store-uri`."""

    def __init__(self, folder: Path, config: str, tree: Tree, updates: int) -> None:
        # Its newer versions prefer a database, and want to be told that files are meant.
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
        params = [Param(key, str(value)[:6000]) for key, value in _flat(tree).items()]
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
    """DIR/wandb, offline; `wandb sync` sends it when its owner wants that."""

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


# name -> what must be installed, and what makes the sink
SINKS: dict[str, tuple[str, Callable[[Path, str, Tree, int], Sink]]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "mlflow": ("mlflow", MLflow),
    "wandb": ("wandb", WeightsAndBiases),
}


def check_sinks(names: Sequence[str]) -> None:
    """Raise BadInput for one whose package is missing, before anything is run."""
    for name in names:
        if find_spec(SINKS[name][0]) is None:
            raise BadInput(
                f"log.sinks: {name} needs the package {SINKS[name][0]}, which is not installed:"
                f' pip install "latecomer[{name}]"'
            )


class Sinks:
    """All sinks of a run; one that fails is left out from then on."""

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
            except Exception as error:  # packages of others may raise anything
                self._fails(name, error)

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
                self._fails(name, error)

    def _fails(self, name: str, error: Exception) -> None:
        self._open.pop(name, None)
        self.troubles.append(f"{name} has taken no more numbers: {first_line(error)}")


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _place(name: str) -> str:
    """Classes in a group of their own."""
    return f"f1/{name.removeprefix('f1_')}" if name.startswith("f1_") else name


def _safe(name: str) -> str:
    """MLflow's names: letters, digits and a few signs."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)


def _flat(tree: Tree, before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found.update(_flat(value, f"{before}{key}."))
        else:
            found[f"{before}{key}"] = value
    return found
