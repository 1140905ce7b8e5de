"""One run: drive the engine, evaluate, write the files, checkpoint, resume."""

import json
import os
import shutil
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors import SafetensorError

from latecomer.core.outcomes import Logged, Note
from latecomer.core.strategy import Strategy
from latecomer.device.lock import FolderLock
from latecomer.errors import BadInput, Interrupted, RunFailed
from latecomer.loading import at, first_line
from latecomer.strategies.parts.flower_rounds import FlowerStrategy
from latecomer.strategies.recipe import Build
from latecomer.study.app_evaluation import AppEvaluator
from latecomer.study.checkpoint import Checkpoints, restore_server
from latecomer.study.config import Config, load_config
from latecomer.study.early_stopping import EarlyStopping
from latecomer.study.evaluate import Evaluator
from latecomer.study.experiment import Experiment
from latecomer.study.files import EventLog, Table, write_atomically, write_models
from latecomer.study.given import Given, how_to_resume
from latecomer.study.learning_rate import RateWarning
from latecomer.study.metrics import LocalScores, Scores
from latecomer.study.results import flatten, read_json, without_nan
from latecomer.study.resumed import (
    check_changeable,
    config_settings,
    keys_of,
    simulation_settings,
)
from latecomer.study.signals import signals_handled
from latecomer.study.sinks import Sinks, check_sinks
from latecomer.study.summary import f1_by_class, summary_of, used_lineages
from latecomer.study.totals import RunTotals

# Tasks per device without one usable update, after which a run gives up.
MAX_FAILED_TASKS_PER_DEVICE = 50


class Silent:
    """Receives the progress of a run and displays nothing; base class of the displays."""

    warnings: tuple[str, ...] = ()  # those that were displayed

    def started(self, experiment: Experiment, folder: Path) -> None: ...
    def advanced(self, share: float, updates: int, virtual_seconds: float) -> None: ...
    def evaluated(self, row: Mapping[str, Any]) -> None: ...
    def warned(self, text: str) -> None: ...
    def finished(self) -> None: ...


def new_folder(path: Path) -> Path:
    """Create the folder of a run; existing files are never changed."""
    try:
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise BadInput(f"{path}: exists already; name another folder as out, or resume it")
        path.mkdir(parents=True, exist_ok=True)
        test = path / "write-test.new"
        test.touch()
        test.unlink()
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from error
    return path


def start_run(
    config: Config,
    folder: Path,
    progress: Silent | None = None,
    strategy: Strategy | FlowerStrategy | Build | None = None,
    given: Given | None = None,
) -> dict[str, Any]:
    """Run from the beginning in a new folder; returns the summary."""
    check_sinks(config.log.sinks)
    experiment = Experiment(config, strategy, given)
    existed = os.path.isdir(folder)
    new_folder(folder)
    with FolderLock(folder), _errors_in_one_line(experiment, folder):
        write_atomically(folder / "config.toml", experiment.config.to_toml())
        write_atomically(folder / "fleet.json", json.dumps(_fleet(experiment)) + "\n")
        if experiment.data_fingerprint:
            kept = {"fingerprint": experiment.data_fingerprint}
            write_atomically(folder / "data.json", json.dumps(kept) + "\n")
        try:
            return _completed(experiment, folder, progress)
        except BadInput:
            # No update was made: the same command with better input finds the folder free.
            shutil.rmtree(folder)
            if existed:
                folder.mkdir()
            raise


def resume_run(
    folder: Path,
    progress: Silent | None = None,
    strategy: Strategy | FlowerStrategy | Build | None = None,
    given: Given | None = None,
    settings: Sequence[str] = (),
) -> dict[str, Any]:
    """Continue from the last checkpoint of a run; a finished run is only read.

    What was given in Python at the start must be given again. `settings` (`a.b=value`) change the
    config from here on; only the keys of `resumed.CHANGEABLE` can.
    """
    check_changeable(settings)
    if not (folder / "config.toml").is_file() or not (folder / "config.toml").stat().st_size:
        raise BadInput(f"{folder}: no run to resume here (it has no config.toml)")
    summary = folder / "summary.json"
    if summary.is_file():
        if settings:
            raise BadInput(f"{folder}: the run is complete, so --set would change nothing")
        return read_json(summary)
    config = load_config(folder / "config.toml", settings)
    check_sinks(config.log.sinks)
    changed = keys_of(settings)
    Checkpoints(folder / "checkpoint", {}, changed).check_settings(config_settings(config))
    experiment = Experiment(config, strategy, given)
    _check_fingerprint(folder, experiment)
    with FolderLock(folder), _errors_in_one_line(experiment, folder):
        return _completed(experiment, folder, progress, changed)


def _completed(
    experiment: Experiment, folder: Path, progress: Silent | None, changed: Collection[str] = ()
) -> dict[str, Any]:
    """Run to the end; bad input after the first update is a failed run, which can be resumed.

    Only the settings `changed` may differ from those of the checkpoint, if there is one.
    """
    run = _Run(experiment, folder, progress or Silent(), changed)
    if changed:
        write_atomically(folder / "config.toml", experiment.config.to_toml())
    try:
        return run.to_the_end()
    except BadInput as error:
        if not run.server.accepted:
            raise
        raise RunFailed(f"{folder}: {error}; {_then_resume(experiment, folder)}") from error


def _then_resume(experiment: Experiment, folder: Path) -> str:
    return f"when that is fixed, {how_to_resume(folder, experiment.in_python)}"


def _check_fingerprint(folder: Path, experiment: Experiment) -> None:
    """BadInput if the data given in Python are not those with which the run began."""
    path = folder / "data.json"
    began_with = read_json(path)["fingerprint"] if path.is_file() else ""
    if experiment.data_fingerprint != began_with:
        raise BadInput(
            f"{folder}: the data given are not those with which the run began; give the same"
            if began_with
            else f"{folder}: the run reads its data from data.source; resume it without data"
        )


def _fleet(experiment: Experiment) -> dict[str, Any]:
    """fleet.json: which devices are late or hostile, when they are reachable, and their widths."""
    fleet, names = experiment.fleet, experiment.federation.class_names
    return {
        "devices": len(experiment.federation.clients),
        "late": sorted(fleet.late),
        "hostile": sorted(experiment.hostile),
        "affected": [names[label] for label in experiment.config.fleet.late.classes],
        "windows": {
            device: (profile.period, profile.windows)
            for device, profile in enumerate(fleet.devices)
            if fleet.has_windows(device)
        },
        # Of the sub-model that each device declares; empty if all train the whole model.
        "widths": {device: experiment.levels[device] for device in experiment.clients}
        if experiment.config.submodels.level == "declared"
        else {},
    }


@contextmanager
def _errors_in_one_line(experiment: Experiment, folder: Path) -> Iterator[None]:
    """Turn any exception of a run into RunFailed with one line; the cause stays attached."""
    try:
        yield
    except (BadInput, RunFailed):
        raise
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunFailed(f"{folder}: {reason}; {_then_resume(experiment, folder)}") from error
    except torch.OutOfMemoryError as error:
        raise RunFailed(
            f"{folder}: out of memory on the accelerator: {first_line(error)}; continue with"
            f" `latecomer run --resume {folder} --set engine.device=cpu` or a lower"
            " engine.memory_mb, or start again with a lower training.batch_size"
        ) from error
    except Exception as error:  # a user's model or strategy may raise anything
        raise RunFailed(f"{folder}: {first_line(error)}{at(error)}") from error


class _Run:
    """One run: its server, engine and files; starts from the checkpoint if there is one."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        progress: Silent,
        changeable: Collection[str] = (),
    ) -> None:
        # One thread: small models are faster with it, and sums always have the same order.
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        self.experiment, self.folder, self.progress = experiment, folder, progress
        self.config = experiment.config
        self.evaluator = (
            Evaluator(experiment)
            if experiment.app is None
            else AppEvaluator(experiment.app, experiment.fleet.late)
        )
        self.server = experiment.server()
        self.engine = experiment.engine(self.server)
        self.engine.on_note = self._log
        self.evaluator.memory_of = self.engine.trainer.memory_of
        self.bounds = experiment.bounds(self.server.strategy)
        settings = simulation_settings(self.config, self.server)
        self.checkpoints = Checkpoints(folder / "checkpoint", settings, changeable)
        self.changes: list[str] = []  # of settings, on resumes
        self.evaluated = (-1, -1)  # updates and version of the last evaluation
        self.wall_before = 0.0
        self.totals = RunTotals()
        self.last: Scores | None = None
        scoring = experiment.scoring
        self.early_stopping = EarlyStopping(
            self.config.stop.patience,
            ("updates", "virtual_seconds", *scoring.columns),
            scoring.stopping,
            scoring.lower_is_better,
        )
        self.initial = experiment.model.init(self.config.seed)
        private = self.config.privacy.epsilon > 0
        self.rate_warning = RateWarning(
            self.config.training.lr, len(experiment.clients), noise=private
        )
        self.sinks = Sinks()
        keep = self.checkpoints.restore(self._restore) or {"events": 0, "metrics": 0}
        self.events = EventLog(folder / "events.jsonl", keep["events"])
        try:
            self.table = Table(folder / "metrics.csv", self._columns(), keep["metrics"])
        except (BadInput, OSError):
            self.events.file.close()
            raise
        if self.checkpoints.fallback:
            note = Note("resume", {"reason": self.checkpoints.fallback})
            self.events.write(self.engine.now, note)
        self.last_progress = (self.server.accepted, self.totals.failures)
        self.begun = time.monotonic()
        self.interrupted = False
        self.saved_at, self.saved_updates = time.monotonic(), self.server.accepted
        if changed := self.checkpoints.changed:
            self.changes.append(f"changed after {self.server.accepted} updates: {changed}")
            self.events.write(self.engine.now, Note("resume", {"reason": self.changes[-1]}))
            self._save()  # so that the next resume compares with the new settings

    def to_the_end(self) -> dict[str, Any]:
        try:
            return self._drive()
        finally:
            # However it ends: buffered lines of an open file must not reach a resumed run.
            self._close()

    def _drive(self) -> dict[str, Any]:
        self.progress.started(self.experiment, self.folder)
        tree = self.config.model_dump(mode="json", exclude_none=True)
        updates = max(0, self.evaluated[0])
        self.sinks.open(self.config.log.sinks, self.folder, self.config.to_toml(), tree, updates)
        self.begun = time.monotonic()
        if self.evaluated[0] < 0:
            self._evaluate()
        try:
            with signals_handled(self._interrupt, signal.SIGINT, signal.SIGTERM):
                reason = self.engine.run(self.bounds, self._after_step)
        finally:
            self.progress.finished()
        if reason == "interrupted" and self.early_stopping.is_over:
            reason = "patience"
        if reason == "interrupted":
            done = f"interrupted after {self.server.accepted} updates"
            if not self.engine.resumable:
                raise Interrupted(
                    f"{done}; a strategy of Flower's cannot be resumed, only started again"
                )
            self._save()
            again = how_to_resume(self.folder, self.experiment.in_python)
            raise Interrupted(f"{done}; continue with {again}")
        if self.server.stopped and not self.server.accepted:
            raise RunFailed(f"{self.folder}: no update could be used: {reason}; {self._suspects()}")
        if self.evaluated != (self.server.accepted, self.server.store.commits):
            self._evaluate()
        return self._finish(self._explained(reason))

    def _suspects(self) -> str:
        """Which settings may be the cause if no update is finite, as a question."""
        if self.experiment.app is not None:
            return "does the app's train function give NaN, or is its learning rate too large?"
        own = {
            "objective.loss": self.experiment.scoring.objective.function,
            "training.function": self.experiment.train,
        }
        found = [f"is training.lr = {self.config.training.lr:g} too large"]
        found += [f"does your {key} give NaN" for key, function in own.items() if function]
        return f"{', or '.join(found)}?"

    def _explained(self, reason: str) -> str:
        """Why the run ended; privacy budgets are named where they are the cause."""
        retired, devices = self.totals.retired, len(self.experiment.clients)
        if not retired or reason in ("updates", "epochs", "virtual_seconds"):
            return reason
        if retired == devices:
            return "all devices have spent their privacy budgets"
        return f"{reason}; {retired} of {devices} devices have spent their privacy budgets"

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """End the run after the present step, with a checkpoint."""
        self.interrupted = True

    def _after_step(self) -> bool:
        every = self.config.evaluate.every
        if self.server.accepted // every > self.evaluated[0] // every:
            self._evaluate()
            self.engine.charge_evaluation()
        if self._checkpoint_is_due():
            self._save()
        self._check_progress()
        self.progress.advanced(self._share(), self.server.accepted, self.engine.now)
        return not (self.interrupted or self.early_stopping.is_over)

    def _check_progress(self) -> None:
        """Fail if all updates have been lost or refused for a long time."""
        if self.server.accepted != self.last_progress[0]:
            self.last_progress = (self.server.accepted, self.totals.failures)
        lost = self.totals.failures - self.last_progress[1]
        if lost > MAX_FAILED_TASKS_PER_DEVICE * len(self.experiment.clients):
            raise RunFailed(
                f"{self.folder}: none of the last {lost} tasks gave an update that could"
                f" be used; the last one: {self.totals.last_failure}; {self._suspects()}"
            )

    def _share(self) -> float:
        """Share of the run that is done, by the nearest bound."""
        b = self.bounds
        return max(
            self.server.accepted / b.updates if b.updates else 0.0,
            self.server.store.commits / b.epochs if b.epochs else 0.0,
            self.engine.now / b.virtual_seconds if b.virtual_seconds else 0.0,
        )

    def _evaluate(self) -> None:
        self.evaluated = (self.server.accepted, self.server.store.commits)
        self.last = self.evaluator.central(self.server, self.engine.now)
        row: dict[str, Any] = {
            "updates": self.server.accepted,
            "version": self.server.store.commits,
            "virtual_seconds": round(self.engine.now, 6),
            "wall_seconds": round(self._wall(), 3),
            **self.last.values,
            **{f"f1_{name}": v for name, v in f1_by_class(self.experiment, self.last).items()},
        }
        if self.config.evaluate.clients:
            own = self.evaluator.local_test(self.server, self.engine.now)
            row |= dict(zip(self._local_columns, (own.mean, own.worst), strict=True))
        if self.config.stop.patience:
            found = self.evaluator.validation(self.server, self.engine.now)
            row |= self.early_stopping.record(row, found)
        self.table.write(row)
        self.events.file.flush()
        self.sinks.row(row)
        self.progress.evaluated(row)
        loss = self.last.values.get("loss")
        if loss is not None and self.experiment.app is None:
            self._check_rate(loss)

    def _check_rate(self, loss: float) -> None:
        """Warns once, in the log, on the display and in summary.json; the run goes on."""
        done = self._share(), self.server.accepted, self.totals.refused
        if text := self.rate_warning.record(loss, self._distance(), *done):
            self._log(self.engine.now, Note("warning", {"reason": text}))
            self.progress.warned(text)

    def _distance(self) -> float:
        """Distance between a model and the initial one over its norm, the largest of all models."""
        store, norm = self.server.store, max(float(self.initial.norm()), 1e-9)
        names = {store.resolve(name) for name in used_lineages(self.experiment, self.server)}
        return max(float((store.head_params(n) - self.initial).norm()) / norm for n in names)

    def _log(self, moment: float, outcome: Logged) -> None:
        self.events.write(moment, outcome)
        self.totals.add(outcome)

    def _checkpoint_is_due(self) -> bool:
        if not self.engine.resumable:
            return False
        every = self.config.checkpoint.every
        if every:
            return self.server.accepted - self.saved_updates >= every
        return time.monotonic() - self.saved_at >= self.config.checkpoint.seconds

    def _save(self) -> None:
        state = {
            "server": self.server.state(),
            "engine": self.engine.state(),
            "evaluated": self.evaluated,
            "wall": self._wall(),
            "totals": self.totals.state(),
            "early_stopping": self.early_stopping.state(),
            "rate_warning": self.rate_warning.state(),
            "changes": self.changes,
            "files": {
                "events": self.events.file.length(),
                "metrics": self.table.file.length(),
            },
        }
        self.checkpoints.save(state, f"updates-{self.server.accepted}-{time.time_ns()}")
        self.saved_at, self.saved_updates = time.monotonic(), self.server.accepted

    def _restore(self, state: Mapping[str, Any]) -> dict[str, int]:
        """Restore a checkpoint; returns the bytes of the files that belong to it."""
        restore_server(self.server, state["server"])
        self.engine.restore(state["engine"])
        self.evaluated = state["evaluated"]
        self.wall_before = state["wall"]
        self.totals.restore(state["totals"])
        self.early_stopping.restore(state["early_stopping"])
        self.rate_warning.restore(state["rate_warning"])
        self.changes = list(state["changes"])
        return dict(state["files"])

    def _wall(self) -> float:
        return self.wall_before + time.monotonic() - self.begun

    def _columns(self) -> list[str]:
        names = self.experiment.label_names
        moments = ("updates", "version", "virtual_seconds", "wall_seconds")
        own = self._local_columns if self.config.evaluate.clients else ()
        scoring, watched = self.experiment.scoring, list[str]()
        if self.config.stop.patience:
            watched = [f"validation_{name}" for name in dict.fromkeys(("loss", scoring.stopping))]
        return [*moments, *scoring.columns, *(f"f1_{name}" for name in names), *own, *watched]

    @property
    def _local_columns(self) -> tuple[str, str]:
        name = f"client_{self.experiment.scoring.main}"
        return name, f"{name}_worst"

    def _finish(self, reason: str) -> dict[str, Any]:
        wall = self._wall()
        lineages = used_lineages(self.experiment, self.server)
        write_models(self.folder, self.server, lineages, self.experiment.model)
        summary = self._summary(reason, wall)
        self.sinks.end(flatten(summary))
        self._close()
        # Last, because it marks the run as complete.
        text = json.dumps(without_nan(summary), indent=2, allow_nan=False)
        write_atomically(self.folder / "summary.json", text + "\n")
        return summary

    def _close(self) -> None:
        self.events.file.close()
        self.table.file.close()
        self.sinks.close()

    def _summary(self, reason: str, wall: float) -> dict[str, Any]:
        central = self.last or self.evaluator.central(self.server, self.engine.now)
        found = summary_of(
            self.experiment,
            self.server,
            self.engine,
            self.totals,
            central,
            self._local_test(),
            wall,
        )
        found["warnings"] += [self.rate_warning.text] if self.rate_warning.text else []
        found["warnings"] += self.sinks.troubles
        found["warnings"] += [self.checkpoints.fallback] if self.checkpoints.fallback else []
        found["warnings"] += self.changes
        found["distance"] = self._distance()
        if not (found["distance"] or self.totals.rollbacks) and self.server.store.commits:
            own = "does your training.function change the model in place?"
            hint = own if self.experiment.train else "is training.lr too small?"
            found["warnings"].append(f"the model has not changed: {hint}")
        return {**found, "best": self.early_stopping.best, "ended_by": reason}

    def _local_test(self) -> LocalScores:
        """The local test score of every device, also written to devices.csv."""
        found = self.evaluator.local_test(self.server, self.engine.now)
        columns = ("device", "late", "examples", found.metric, "lineage")
        table = Table(self.folder / "devices.csv", columns)
        late, lineage_of = self.experiment.fleet.late, self.server.lineage_of
        for device, client in enumerate(self.experiment.federation.clients):
            row = (device, int(device in late), len(client.train.y), found.each.get(device))
            table.write(dict(zip(columns, (*row, lineage_of(device)), strict=True)))
        table.file.close()
        return found
