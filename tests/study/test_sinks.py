"""Sinks: what they write is read back with the packages that they are for."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from latecomer.errors import BadInput
from latecomer.study import sinks
from latecomer.study.config import Config
from latecomer.study.results import Result
from latecomer.study.runner import Silent, resume_run, start_run
from latecomer.study.sinks import Sinks, check_sinks

MakeConfig = Callable[..., Config]
Start = Callable[..., tuple[Path, dict[str, Any]]]


def test_tensorboard(start: Start) -> None:
    pytest.importorskip("tensorboard", reason='needs the extra "tensorboard"')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, summary = start("evaluate.every=10", 'log.sinks=["tensorboard"]')
    found: Any = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    metrics = Result(folder).metrics
    scalars = found.Scalars("accuracy")
    assert [s.step for s in scalars] == metrics["updates"].tolist()
    assert [s.value for s in scalars] == pytest.approx(metrics["accuracy"].tolist())
    assert "f1/5" in found.Tags()["scalars"]
    last = found.Scalars("summary/client_accuracy_mean")[0].value
    assert last == pytest.approx(summary["client_accuracy"]["mean"])


class InterruptedRun(BaseException):
    pass


class StopAt(Silent):
    def advanced(self, share: float, updates: int, virtual_seconds: float) -> None:
        if updates >= 35:
            raise InterruptedRun


def test_a_resumed_run_continues_in_the_same_files(tiny: MakeConfig, tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason='needs the extra "mlflow"')
    from mlflow import MlflowClient

    folder = tmp_path / "run"
    config = tiny("evaluate.every=10", "checkpoint.every=15", 'log.sinks=["mlflow"]')
    with pytest.raises(InterruptedRun):
        start_run(config, folder, StopAt())
    summary = resume_run(folder)
    client: Any = MlflowClient(tracking_uri=(folder / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("latecomer").experiment_id
    (run,) = client.search_runs([experiment])
    assert run.info.status == "FINISHED"
    assert run.data.params["strategy.name"] == "fedasync"
    assert run.data.metrics["accuracy"] == pytest.approx(summary["accuracy"])
    steps = {m.step for m in client.get_metric_history(run.info.run_id, "accuracy")}
    assert steps == set(Result(folder).metrics["updates"])


@pytest.mark.slow
def test_weights_and_biases_stays_offline(start: Start) -> None:
    pytest.importorskip("wandb", reason='needs the extra "wandb"')
    folder, summary = start('log.sinks=["wandb"]')
    assert summary["warnings"] == []
    (written,) = folder.glob("wandb/offline-run-*/*.wandb")
    end = time.monotonic() + 30
    while written.stat().st_size < 1000:  # a process of its own writes it
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_missing_package_is_one_line(tiny: MakeConfig, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r'mlflow .* pip install "latecomer\[mlflow\]"'):
        start_run(tiny('log.sinks=["mlflow"]'), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    check_sinks([])


@pytest.mark.parametrize("name", ["tensorbord", 3])
def test_an_unknown_sink_is_named(tiny: MakeConfig, name: object) -> None:
    with pytest.raises(BadInput, match=r"log\.sinks.*tensorboard"):
        tiny(f"log.sinks=[{name!r}]")


class Broken:
    """Accepts one row and then raises."""

    def __init__(self, folder: Path, config: str, tree: Any, updates: int) -> None:
        self.rows = 0

    def row(self, updates: int, row: Any) -> None:
        self.rows += 1
        if self.rows > 1:
            raise OSError("no space left")

    def end(self, summary: Any) -> None:
        raise AssertionError("it was closed before")

    def close(self) -> None: ...


def test_a_sink_that_fails_does_not_end_the_run(start: Start, monkeypatch: Any) -> None:
    monkeypatch.setitem(sinks.SINKS, "tensorboard", ("json", Broken))
    folder, summary = start("evaluate.every=10", 'log.sinks=["tensorboard"]')
    assert summary["updates"] == 60
    assert summary["warnings"] == [
        "log.sinks: tensorboard failed and was switched off: OSError: no space left"
    ]
    assert folder.joinpath("summary.json").is_file()


def test_a_sink_that_cannot_be_opened_is_dropped(tmp_path: Path, monkeypatch: Any) -> None:
    def fails(*_: object) -> Any:
        raise RuntimeError("no")

    monkeypatch.setitem(sinks.SINKS, "mlflow", ("json", fails))
    found = Sinks()
    found.open(["mlflow"], tmp_path, "", {}, 0)
    found.row({"updates": 1, "accuracy": 0.5, "name": "x", "flag": True, "none": None})
    found.close()
    assert found.troubles == ["log.sinks: mlflow failed and was switched off: RuntimeError: no"]
