"""Deployed runs with a folder: event log, checkpoints to resume from, and the final model."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from latecomer.core.outcomes import Logged, Note
from latecomer.core.server import Server
from latecomer.device.lock import FolderLock
from latecomer.device.networks import Networks
from latecomer.engines.deployment_loop import WHOLE, DeploymentLoop, Timeouts
from latecomer.engines.task_codec import TaskCodec
from latecomer.engines.transport import Transport
from latecomer.engines.virtual import Bounds
from latecomer.study.checkpoint import Checkpoints, restore_server
from latecomer.study.files import EventLog, write_models
from latecomer.study.resumed import deployment_settings
from latecomer.study.round_metrics import RoundMetrics
from latecomer.study.scores import Evaluate, Scores

log = logging.getLogger(__name__)


def serve(
    transport: Transport,
    server: Server,
    folder: str | Path,
    bounds: Bounds,
    networks: Networks | None = None,
    timeouts: Timeouts | None = None,
    every: int = 1,
    codec: TaskCodec | None = None,
    evaluate: Evaluate | None = None,
) -> str:
    """Drive `server` over real nodes until a bound is reached; returns the name of that bound.

    transport: carries the messages; in a Flower `ServerApp` this is `GridTransport(grid)`.
    folder: event log, checkpoints and final model. With a checkpoint of an earlier run in it, the
        run resumes from there; another seed, strategy or training setting than before is refused,
        except the learning rate.
    networks: the network of every sub-model width; None: all devices train the whole model, and
        no model file is written.
    timeouts: seconds to wait for nodes and replies; None: the defaults of `Timeouts`.
    every: commits between two checkpoints.
    codec: message format of the devices. None: devices run Latecomer's `client_app`;
        `PlainFlowerCodec`: any Flower `ClientApp`.
    evaluate: metrics by name of a parameter vector, for metrics.csv: of new versions, at most
        every 2 seconds, and of the last one.
    """
    scores = None if evaluate is None else Scores(folder, evaluate)
    on_commit = scores or (lambda server: None)
    try:
        run = Deployment(
            server, transport, Path(folder), networks, timeouts, every, on_commit, codec
        )
        reason = run.run(bounds)
        if scores is not None:
            scores.final(server)
        return reason
    finally:
        transport.close()


class Deployment:
    """A deployment loop whose events and checkpoints are written to `folder`; see `serve`.

    `metrics` are saved in the checkpoints. `on_step` is called after every step of the loop, before
    a checkpoint, `on_note` with every line of the event log.
    """

    def __init__(
        self,
        server: Server,
        transport: Transport,
        folder: Path,
        networks: Networks | None = None,
        timeouts: Timeouts | None = None,
        every: int = 1,
        on_commit: Callable[[Server], None] = lambda server: None,
        codec: TaskCodec | None = None,
        metrics: RoundMetrics | None = None,
        on_step: Callable[[], None] = lambda: None,
        on_note: Callable[[Logged], None] = lambda note: None,
    ) -> None:
        self.on_note = on_note
        self.server, self.folder, self.networks, self.every = server, folder, networks, every
        self.on_commit, self.metrics, self.on_step = on_commit, metrics, on_step
        submodels = WHOLE if networks is None else networks.submodels
        self.loop = DeploymentLoop(server, transport, timeouts, submodels, self._log, codec=codec)
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = FolderLock(folder)
        settings = deployment_settings(server)
        self.checkpoints = Checkpoints(folder / "checkpoint", settings, ("training.lr",))
        try:
            keep = self.checkpoints.restore(self._restore) or 0
            self.events = EventLog(folder / "events.jsonl", keep)
        except BaseException:
            self.lock.close()
            raise
        self.saved = server.store.commits
        if keep:
            self._log(self.loop.now, self._resumed())

    def _resumed(self) -> Note:
        """The log line of a resumed run: its id, the new session, and the open tasks by key."""
        keys = self.loop.in_flight.keys
        names = {"run": self.loop.shared.run_id, "session": self.loop.shared.session}
        fields = {"version": self.saved, **names, "open": [*keys.values()]}
        if self.checkpoints.fallback:
            log.warning(self.checkpoints.fallback)
            fields["reason"] = self.checkpoints.fallback
        if self.checkpoints.changed:
            log.warning("resumed with another setting: %s", self.checkpoints.changed)
            fields["changed"] = self.checkpoints.changed
        return Note("resume", fields)

    def run(self, bounds: Bounds, finish: Callable[[], None] = lambda: None) -> str:
        """Run to the first bound; `finish` is called after it, with everything still open."""
        try:
            reason = self.loop.run(bounds, self._after_step)
            self._save()
            finish()
            self._save()
            if self.networks is not None:
                lineages = sorted(self.server.clusters())
                write_models(self.folder, self.server, lineages, self.networks.whole)
        finally:
            self.events.file.close()
            self.lock.close()
        return reason

    def _after_step(self) -> bool:
        self.on_step()
        if self.server.store.commits - self.saved >= self.every:
            self._save()
            self.on_commit(self.server)
        self.events.file.flush()  # so that refusals are visible at once
        return True

    def _save(self) -> None:
        state = {
            "server": self.server.state(),
            "loop": self.loop.state(),
            "events": self.events.file.length(),
            "metrics": None if self.metrics is None else self.metrics.state(),
        }
        commits = self.server.store.commits
        # Unique among all processes of the run, also with the same number of commits.
        self.checkpoints.save(
            state, f"commits-{commits}-{self.loop.shared.session}-{self.loop.now:.6f}"
        )
        self.saved = commits

    def _restore(self, state: dict[str, Any]) -> int:
        """Restore a checkpoint; returns the bytes of the event log that belong to it."""
        restore_server(self.server, state["server"])
        self.loop.restore(state["loop"])
        if self.metrics is not None:
            self.metrics.restore(state["metrics"])
        return int(state["events"])

    def _log(self, time: float, note: Logged) -> None:
        self.events.write(time, note)
        self.on_note(note)
        if note.kind in ("refusal", "drop", "overdue", "away", "introduction"):
            log.info("%s %s", note.kind, dict(note.fields))
        elif note.kind in ("quarantine", "rollback"):
            log.warning("%s %s", note.kind, dict(note.fields))
