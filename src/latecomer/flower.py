"""`AsyncStrategy`: an asynchronous strategy in the place of one of Flower's, for any Flower app."""

import json
import logging
import os
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.numpy import save_file

from latecomer.core.arrays import ArrayLayout
from latecomer.core.messages import Update
from latecomer.core.outcomes import Logged
from latecomer.core.params import digest
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy
from latecomer.engines.client_evaluations import EvaluationReply
from latecomer.engines.flower import RAISED, GridTransport
from latecomer.engines.plain import ROUND, PlainFlowerCodec, spec_of
from latecomer.engines.transport import Timeouts, Transport
from latecomer.engines.virtual import Bounds
from latecomer.errors import BadInput, RunFailed
from latecomer.strategies.recipe import build_strategy, find_recipe
from latecomer.study.deployed import Deployment
from latecomer.study.files import RUN_FOLDER_VARIABLE, numbered_folder, write_atomically
from latecomer.study.metric_names import NODES
from latecomer.study.report import write_report
from latecomer.study.results import without_nan
from latecomer.study.round_metrics import RoundMetrics
from latecomer.study.view.history import read_history

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Result

    EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

log = logging.getLogger("flwr.latecomer")  # so that its lines are in Flower's log of the run
RUNS = Path("runs")
TIMES = ("updates", "version", "wall_seconds")
MAX_ERRORS = 5  # in a row on every node; then the run ends
NODES_EVERY = 1.0  # seconds between two looks at the list of nodes before the run


class AsyncStrategy:
    """An asynchronous strategy with the `start` of Flower's strategies.

    strategy: a name of `latecomer list strategies` or a `Strategy`. The default is `latecomer`
        without compensation, which needs to know how devices train.
    folder: of the event log, metrics.csv, checkpoints, model and report. If there is a checkpoint
        in it, the run resumes from there. None: $LATECOMER_RUN_FOLDER, which `latecomer deploy`
        sets, or else a new folder under runs/.
    fraction_evaluate: share of the connected nodes that evaluate the model; 0: none.
    evaluate_every: rounds between two evaluations, on nodes and by `evaluate_fn`.
    min_available_nodes: nodes to wait for before the run begins.
    updates: client updates after which the run ends; 0: as many as `num_rounds` rounds bring.
    seconds: seconds after which the run ends; 0: no bound.
    seed: of the strategy's and the evaluation's choice of nodes.
    options: of the strategy, by name.
    """

    def __init__(
        self,
        strategy: str | Strategy = "latecomer",
        *,
        folder: str | Path | None = None,
        fraction_evaluate: float = 1.0,
        evaluate_every: int = 1,
        min_available_nodes: int = 2,
        updates: int = 0,
        seconds: float = 0.0,
        seed: int = 1,
        **options: Any,
    ) -> None:
        self.strategy = _strategy(strategy, options)
        self.folder = None if folder is None else Path(folder)
        if not 0 <= fraction_evaluate <= 1:
            raise BadInput(f"fraction_evaluate = {fraction_evaluate}: must be from 0 to 1")
        least_values: dict[str, tuple[float, int]] = {
            "evaluate_every": (evaluate_every, 1),
            "min_available_nodes": (min_available_nodes, 1),
            "updates": (updates, 0),
            "seconds": (seconds, 0),
        }
        for name, (value, least) in least_values.items():
            if value < least:
                raise BadInput(f"{name} = {value}: must be at least {least}")
        self.fraction_evaluate, self.evaluate_every = fraction_evaluate, evaluate_every
        self.min_available_nodes, self.updates, self.seconds = min_available_nodes, updates, seconds
        self.seed = seed

    def start(
        self,
        grid: "Grid",
        initial_arrays: "ArrayRecord",
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: "ConfigRecord | None" = None,
        evaluate_config: "ConfigRecord | None" = None,
        evaluate_fn: "EvaluateFn | None" = None,
    ) -> "Result":
        """Train over the nodes of `grid` until a bound is reached; signature and result of Flower.

        A round is as many updates as nodes were connected when the run began, and the run ends
        after `num_rounds` of them. Nodes never wait for each other unless the strategy does.

        timeout: seconds after which a node that has not answered a task is no longer waited for
            (its update is still used), and after which an evaluation is given up.
        train_config: sent with every task, with the present round as `server-round`.
        evaluate_config: sent with every evaluation, likewise.
        evaluate_fn: called with the round and the model before the run (round 0) and after every
            `evaluate_every` rounds.
        """
        transport = GridTransport(grid)
        try:
            run = FlowerRun(self, transport, initial_arrays, train_config, timeout)
            return run.start(num_rounds, evaluate_config, evaluate_fn)
        finally:
            transport.close()


class FlowerRun:
    """One `AsyncStrategy.start`: server, loop and files, and the evaluations between rounds."""

    def __init__(
        self,
        given: AsyncStrategy,
        transport: Transport,
        initial_arrays: "ArrayRecord",
        train_config: Mapping[str, Any] | None,
        timeout: float,
    ) -> None:
        self.given, self.transport, self.timeout = given, transport, timeout
        self._errors: dict[int, int] = {}  # device -> tasks in a row in which its client raised
        arrays = {name: array.numpy() for name, array in initial_arrays.items()}
        self.arrays = ArrayLayout.of(arrays)
        vector, unaveraged = self.arrays.split(arrays)
        self.folder = given.folder or _folder(given.strategy.name)
        self.metrics = RoundMetrics(self.folder / "metrics.csv")
        self.server = Server(
            vector,
            given.strategy,
            spec_of(train_config or {}),
            seed=given.seed,
            networks=lambda submodel: self.arrays,
            unaveraged=unaveraged,
        )
        self.codec = PlainFlowerCodec(
            self.arrays, train_config, lambda: self.metrics.round_of(self.server.accepted)
        )
        self.deployment = Deployment(
            self.server,
            transport,
            self.folder,
            timeouts=Timeouts(overdue=timeout),
            codec=self.codec,
            metrics=self.metrics,
            on_step=self._after_step,
            on_note=self._noted,
        )
        self.loop = self.deployment.loop
        self.loop.ends_idle = True  # nodes are free for the last evaluation
        self.loop.on_update = self._updated
        self.loop.evaluations.on_reply = self._evaluated_on_device
        self._evaluate_config: dict[str, Any] = {}
        self._evaluate_fn: EvaluateFn | None = None

    def start(
        self,
        num_rounds: int,
        evaluate_config: Mapping[str, Any] | None,
        evaluate_fn: "EvaluateFn | None",
    ) -> "Result":
        self._evaluate_config, self._evaluate_fn = dict(evaluate_config or {}), evaluate_fn
        if not self.metrics.per_round:
            self.metrics.per_round = self._wait_for_nodes()
        updates = self.given.updates or num_rounds * self.metrics.per_round
        name, size = self.server.strategy.name, self.arrays.layout.size
        log.info("latecomer: %s, %d floats, %d updates; files in %s", name, size, updates,
                 self.folder)  # fmt: skip
        if self.server.accepted:
            log.info("latecomer: resumed after %d updates", self.server.accepted)
        elif 0 not in self.metrics.marks:
            self._evaluate_on_server(0)
        bounds = Bounds(updates=updates, virtual_seconds=self.given.seconds)
        reason = self.deployment.run(bounds, self._finish)
        self._write()
        commits = self.server.store.commits
        log.info("latecomer: ended by %s: %d updates, %d versions", reason, self.server.accepted,
                 commits)  # fmt: skip
        if self.server.stopped:
            raise RunFailed(f"the run has ended: {reason}")
        if not commits:
            log.warning("latecomer: %s has made no version of the model in %d updates; give it more"
                        " rounds, or a smaller buffer", name, self.server.accepted)  # fmt: skip
        return self._result()

    def _wait_for_nodes(self) -> int:
        """The number of connected nodes, when there are at least `min_available_nodes`."""
        need, said = self.given.min_available_nodes, -1
        while (count := len(self.transport.nodes())) < need:
            if count != said:
                log.info("latecomer: waiting for nodes: %d connected, %d needed", count, need)
                said = count
            time.sleep(NODES_EVERY)
        return count

    # Between rounds.

    def _updated(self, update: Update) -> None:
        self.metrics.trained(update.num_examples, update.metrics)

    def _noted(self, note: Logged) -> None:
        """Show failures in Flower's log, and count the errors of each device in a row."""
        fields = note.fields
        if note.kind in ("drop", "refusal"):
            log.warning("latecomer: device %s: %s", fields.get("device"), fields["reason"])
        if note.kind == "drop" and str(fields["reason"]).startswith(RAISED):
            self._errors[fields["device"]] = self._errors.get(fields["device"], 0) + 1
        elif note.kind == "arrival":
            self._errors.pop(fields["device"], None)
        if len(self._errors) >= self.metrics.per_round > 0 and (
            min(self._errors.values()) >= MAX_ERRORS
        ):
            raise RunFailed(
                f"all nodes have failed {MAX_ERRORS} times in a row: {fields['reason']}"
            )

    def _after_step(self) -> None:
        done = self.metrics.round_of(self.server.accepted) - 1
        if done // self.given.evaluate_every > max(self.metrics.marks, default=0) // (
            self.given.evaluate_every
        ):
            self._evaluate(done)

    def _finish(self) -> None:
        """Evaluate the final model, and wait for the nodes that do."""
        updates, last = self.server.accepted, max(self.metrics.marks, default=0)
        number = self.metrics.round_of(updates - 1) if updates else 0
        if number > last or self.metrics.marks.get(last, [updates])[0] != updates:
            self._evaluate(number)
        elif number and number not in self.metrics.clients:
            self._evaluate_on_devices(number)
        self.loop.finish_evaluations(self.timeout)

    def _evaluate(self, number: int) -> None:
        self._evaluate_on_server(number)
        self._evaluate_on_devices(number)

    def _evaluate_on_server(self, number: int) -> None:
        found = None
        if self._evaluate_fn is not None:
            found = self._evaluate_fn(number, self._records())
        server = self.server
        row = number, server.accepted, server.store.commits, self.loop.now
        self.metrics.evaluated(*row, None if found is None else dict(found))
        shown = "" if found is None else f", {dict(found)}"
        log.info("latecomer: round %d: %d updates, %d versions%s", *row[:3], shown)

    def _evaluate_on_devices(self, number: int) -> None:
        able = sorted(self.loop.evaluations.able())
        count = min(len(able), max(1, round(self.given.fraction_evaluate * len(able))))
        if not able or not self.given.fraction_evaluate:
            return
        devices = random.Random(f"{self.given.seed} {number}").sample(able, count)
        config = {**self._evaluate_config, ROUND: number}
        payload = self.codec.payload(self.server.model(), self.server.unaveraged, config)
        self.loop.evaluations.request(number, devices, payload)

    def _evaluated_on_device(self, reply: EvaluationReply) -> None:
        self.metrics.evaluated_on_device(reply.round, reply.examples, reply.metrics)

    # The result.

    def _records(self) -> "ArrayRecord":
        from flwr.app import Array, ArrayRecord

        arrays = self.arrays.join(self.server.model(), self.server.unaveraged)
        return ArrayRecord({name: Array(each) for name, each in arrays.items()})

    def _write(self) -> None:
        arrays = self.arrays.join(self.server.model(), self.server.unaveraged)
        save_file(arrays, self.folder / "model.safetensors")
        text = json.dumps(without_nan(self._summary()), indent=2)
        write_atomically(self.folder / "summary.json", text + "\n")
        try:
            write_report(self.folder)
        except BadInput as error:  # the app may send no metrics that a report can show
            log.warning("latecomer: no report: %s", error)

    def _summary(self) -> dict[str, Any]:
        server, shared = self.server, self.loop.shared
        history = read_history(self.folder / "events.jsonl")
        counts = history.staleness
        mean = sum(k * n for k, n in counts.items()) / max(1, sum(counts.values()))
        rows = self.metrics.rows()
        return {
            "strategy": server.strategy.name,
            "source": "a Flower app",
            "devices": len(self.loop.registry.devices),
            "seed": self.given.seed,
            "updates": server.accepted,
            "versions": server.store.commits,
            "virtual_seconds": round(self.loop.now, 6),
            "wall_seconds": round(self.loop.now, 3),
            **_flat(rows[-1] if rows else {}),
            "staleness": {"mean": mean, "max": max(counts, default=0)},
            "bytes": {"up": shared.bytes_up, "down": shared.bytes_down},
            "epsilon": None,
            "compensation": None,
            "clusters": None,
            "model_hash": digest([server.model()]),
        }

    def _result(self) -> "Result":
        from flwr.app import MetricRecord
        from flwr.serverapp.strategy import Result

        def records(rounds: Mapping[int, Mapping[str, Any]]) -> "dict[int, MetricRecord]":
            return {number: MetricRecord(dict(each)) for number, each in rounds.items()}

        metrics = self.metrics
        return Result(
            self._records(),
            records(metrics.training),
            records(metrics.clients),
            records(metrics.server),
        )


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a row of metrics.csv as summary.json has them: those on devices as means."""
    metrics = {name: value for name, value in row.items() if name not in TIMES}
    return {
        name: {"mean": value} if name.startswith("client_") and name != NODES else value
        for name, value in metrics.items()
    }


def _strategy(given: str | Strategy, options: Mapping[str, Any]) -> Strategy:
    if isinstance(given, Strategy):
        if options:
            raise BadInput(f"{next(iter(options))}: a Strategy is given complete, without options")
        return given
    if not isinstance(given, str):
        kind = type(given).__name__
        raise BadInput(f"a {kind}: allowed is a name of `latecomer list strategies`, or a Strategy")
    if find_recipe(given).name == "latecomer":
        # Compensation repeats the training of devices, which is not known here.
        options = {"compensate": False, **options}
    return build_strategy(given, options)


def _folder(strategy: str) -> Path:
    named = os.environ.get(RUN_FOLDER_VARIABLE)
    return Path(named) if named else numbered_folder(RUNS, f"flower-{strategy}")
