"""Hostile devices of a simulation: their updates are changed before the server checks them.

| kind | the update of a hostile device |
|---|---|
| sign-flip | delta * -strength |
| scale | delta * strength |
| noise | delta + Gaussian noise whose norm is strength * the norm of delta |
| label-flip | of training on labels K - 1 - y instead of y, of K classes |
| free-rider | delta 0 |
| claim-examples | num_examples * strength, rounded, 1 at least |

Metrics are reported as they are. A delta that lazy upload leaves out stays out.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.linalg import vector_norm as norm

from latecomer.core.messages import Task, Update
from latecomer.core.strategy import Stateful
from latecomer.device.client import Client
from latecomer.device.training import mixed
from latecomer.engines.trainers import TaskClient
from latecomer.fleet.random_streams import RandomStream, stream_rng

ATTACK_STREAM = 5  # random stream of the noise, beside batches, privacy noise and layers


class Attack(Stateful):
    """Changes the updates of `devices` to tasks sent after `begin` accepted updates.

    The decision is made when a task is sent, not when its update arrives: training ahead in a
    batch must know it. The state is the number of the first task from which on it is made.
    """

    kept = ("_first",)

    def __init__(
        self,
        kind: str = "none",
        devices: Collection[int] = (),
        strength: float = 10.0,
        begin: int = 0,
        seed: int = 0,
    ) -> None:
        self.kind, self.strength, self.begin, self.seed = kind, strength, begin, seed
        self.devices = frozenset(devices if kind != "none" else ())
        self._first: int | None = None

    def sent(self, task: Task, accepted: int) -> None:
        """Note that the task was sent when the server had accepted that many updates."""
        if self._first is None and accepted >= self.begin:
            self._first = task.id

    def concerns(self, task: Task) -> bool:
        """Whether the update of this task is a hostile one."""
        return task.device in self.devices and self._first is not None and task.id >= self._first

    def changed(self, update: Update, task: Task) -> Update:
        """The update that the device of the task sends in place of an honest one."""
        if not self.concerns(task):
            return update
        if self.kind == "claim-examples":
            return replace(update, num_examples=max(1, round(self.strength * update.num_examples)))
        if update.delta is None:
            return update
        return replace(update, delta=self._delta(update.delta, task))

    def _delta(self, delta: Tensor, task: Task) -> Tensor:
        match self.kind:
            case "sign-flip":
                return delta * -self.strength
            case "scale":
                return delta * self.strength
            case "noise":
                stream = mixed(self.seed, ATTACK_STREAM, task.device, task.number)
                noise = torch.randn(delta.shape, generator=torch.Generator().manual_seed(stream))
                factor: Tensor = self.strength * norm(delta) / norm(noise)
                return delta + noise * factor
            case "free-rider":
                return torch.zeros_like(delta)
        return delta

    def clients(self, clients: Mapping[int, TaskClient]) -> Mapping[int, TaskClient]:
        """The clients, where hostile ones flip the labels that they train on if the kind says."""
        if self.kind != "label-flip":
            return clients
        return {
            device: FlippedLabels(client, self)
            if device in self.devices and isinstance(client, Client)
            else client
            for device, client in clients.items()
        }


class FlippedLabels(Client):
    """The client with labels K - 1 - y in the tasks that the attack concerns."""

    def __init__(self, client: Client, attack: Attack) -> None:
        super().__init__(
            client.device,
            client.networks,
            client.x,
            client.y,
            client.seed,
            client.privacy,
            client.stream,
            client.system_noise,
            client.train,
            client.config,
        )
        self.attack = attack

    def data(self, task: Task) -> Sequence[Tensor]:
        found = super().data(task)
        if not self.attack.concerns(task):
            return found
        x, y = found
        return x, self.networks.whole.num_classes - 1 - y


def hostile_devices(devices: Iterable[int], share: float, seed: int) -> frozenset[int]:
    """`share` of the devices at random, rounded, one at least if the share is above 0.

    With the same seed, those of a smaller share are among those of a larger one.
    """
    fleet = sorted(devices)
    count = max(1, round(share * len(fleet))) if share else 0
    picked = stream_rng(seed, RandomStream.ATTACK).permutation(fleet)[:count]
    return frozenset(picked.tolist())
