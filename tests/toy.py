"""A toy problem: every device pulls the model half-way towards a point of its own."""

import json
from dataclasses import dataclass, field

import torch
from torch import nn

from latecomer.core.codec import decode, encode, storable
from latecomer.core.messages import Task, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy
from latecomer.core.submodel import take
from latecomer.device.flat import FlatModel
from latecomer.engines.virtual import Bounds, ServerCosts, VirtualEngine
from latecomer.fleet.fleet import Fleet
from latecomer.fleet.profile import DeviceProfile
from latecomer.strategies.recipe import build_strategy

SIZE = 6
EXAMPLES = 10
# As many parameters as the toy vector has, for strategies that train on the server.
NETWORK = FlatModel(lambda: nn.Linear(2, 2), (2,), 2)
# Little effort where a strategy does a lot of work on the server.
QUICK = {"iterations": 3, "samples": 2}


@dataclass
class ToyTrainer:
    """delta = (point of the device - params) / 2, plus noise that hangs on the task number."""

    asked: list[int] = field(default_factory=list)

    def examples(self, task: Task) -> int:
        return EXAMPLES

    def renew(self, task: Task) -> bool:
        return True

    def update(self, task: Task, rebases: tuple = ()) -> Update:
        task = task.chosen(rebases[-1][1] if rebases else 0)
        self.asked.append(task.id)
        noise = torch.Generator().manual_seed(1000 * task.device + task.number)
        point = torch.full((SIZE,), float(task.device)) + 0.1 * torch.randn(SIZE, generator=noise)
        delta = (take(point, task.submodel) - task.params) / 2
        return Update(task.id, delta, EXAMPLES, choice=rebases[-1][1] if rebases else 0)

    def expect(self, task: Task, arrives: float) -> None: ...
    def forget(self, task_id: int) -> None: ...
    def restore(self, state: dict) -> None: ...

    def state(self) -> dict:
        return {}


def toy_fleet(devices: int = 5, **profile: float) -> Fleet:
    """Device i needs i + 1 seconds for a task."""
    return Fleet(
        tuple(DeviceProfile(seconds_per_task=i + 1.0, **profile) for i in range(devices)), seed=3
    )


def quick_options(strategy: str, options: dict) -> dict:
    """The options, with little inversion effort where the strategy inverts."""
    if strategy.startswith("feddc") or strategy == "latecomer":
        return {**QUICK, "server_gflops": 1e-6, **options}
    return options


def toy_server(strategy: str, options: dict | None = None) -> Server:
    return server_of(toy_strategy(strategy, options))


def toy_strategy(strategy: str, options: dict | None = None) -> Strategy:
    return build_strategy(strategy, quick_options(strategy, options or {}))


def server_of(strategy: Strategy) -> Server:
    return Server(
        torch.zeros(SIZE),
        strategy,
        TrainSpec(lr=0.5),
        seed=7,
        networks=lambda submodel: NETWORK if submodel is None else None,
    )


@dataclass
class ToyRun:
    """An engine over the toy problem that keeps its log."""

    server: Server
    fleet: Fleet
    costs: ServerCosts = field(default_factory=ServerCosts)
    log: list = field(default_factory=list)
    trainer: ToyTrainer = field(default_factory=ToyTrainer)

    def __post_init__(self) -> None:
        self.engine = VirtualEngine(
            self.server,
            self.fleet,
            self.trainer,
            range(len(self.fleet.devices)),
            self.costs,
            lambda time, note: self.log.append((time, note.kind, dict(note.fields))),
        )

    def until(self, updates: int = 0, **bounds) -> str:
        return self.engine.run(Bounds(updates, **bounds), lambda: True)

    def carried_over(self, twin: "ToyRun") -> "ToyRun":
        """`twin`, a fresh run of the same, at this one's checkpoint as a file would hold it."""
        tree, tensors = encode({"server": self.server.state(), "engine": self.engine.state()})
        state = decode(json.loads(json.dumps(tree)), storable(tensors))
        twin.server.restore(state["server"])
        twin.engine.restore(state["engine"])
        return twin

    def lines(self, kind: str) -> list[tuple[float, dict]]:
        return [(time, fields) for time, k, fields in self.log if k == kind]

    def heads(self) -> dict[str, list[float]]:
        store = self.server.store
        return {name: store.head_params(name).tolist() for name in store.lineages}


def toy_run(strategy: str, updates: int = 40, fleet: Fleet | None = None, **options) -> ToyRun:
    run = ToyRun(toy_server(strategy, options), fleet or toy_fleet())
    run.until(updates)
    return run
