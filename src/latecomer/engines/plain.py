"""Codec for Flower apps without Latecomer: they receive a model and return a trained one.

The messages are those of Flower's strategies: the arrays of a state_dict and a config, and in the
reply arrays of the same names and `num-examples`. A device is identified by its node. Its delta is
the returned model minus the model of the task.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from latecomer.core.messages import ServingSettings, Task, Update
from latecomer.core.params import Layout
from latecomer.core.server import Server
from latecomer.engines.task_codec import TaskCodec
from latecomer.engines.wire import (
    PLAIN,
    Introduction,
    InvalidPayload,
    Packed,
    Payload,
    check_metrics,
    pack_one,
    quoted,
    unpack_one,
)
from latecomer.errors import BadInput

EXAMPLES = "num-examples"


class PlainFlowerCodec(TaskCodec):
    """Encodes tasks for any Flower `ClientApp` whose train function takes and returns arrays."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def check(self, server: Server) -> None:
        size = server.store.head_params().numel()
        if size != self.layout.size:
            raise BadInput(f"the server's model has {size} values, the layout {self.layout.size}")
        if needs := needs_of(server):
            raise BadInput(
                f"strategy {server.strategy.name!r} needs {needs}, which a Flower app that does"
                " not run Latecomer cannot give; use latecomer's client_app or another strategy"
            )

    def known(self, node: int) -> Introduction:
        """The device is named after its node, which Flower authenticates."""
        return Introduction(f"node-{node}", f"node-{node}")

    def encode(
        self, task: Task, key: str, run: str, until: int = 0, serving: ServingSettings = PLAIN
    ) -> Payload:
        spec = task.spec
        config: dict[str, int | float] = {
            "server-round": task.version + 1,
            "lr": spec.lr * spec.lr_scale,
            "local-epochs": spec.local_epochs,
            "batch-size": spec.batch_size,
        }
        if spec.prox:
            config["proximal-mu"] = spec.prox
        tensors = self.layout.unflatten(task.params)
        return Payload(config, named={name: pack_one(each) for name, each in tensors.items()})

    def decode(self, payload: Payload, task: Task, key: str, newer: Mapping[int, str]) -> Update:
        trained = self._model(payload.named)
        found = dict(payload.metrics)
        check_metrics(found)
        if EXAMPLES not in found:
            raise InvalidPayload(f"{EXAMPLES!r} is missing")
        examples = found.pop(EXAMPLES)
        # Flower's records may hold lists of numbers, which no strategy reads.
        metrics = {name: value for name, value in found.items() if not isinstance(value, list)}
        return Update(task.id, trained.sub_(task.params), examples, metrics)

    def _model(self, named: Mapping[str, Packed]) -> Tensor:
        """The arrays as one vector; InvalidPayload unless they are exactly those of the layout."""
        layout = self.layout
        if set(named) != set(layout.names):
            unknown = sorted(set(named) - set(layout.names))
            missing = sorted(set(layout.names) - set(named))
            what = f"{quoted(unknown[0])} is unknown" if unknown else f"{missing[0]!r} is missing"
            raise InvalidPayload(f"the arrays are not those of the model: {what}")
        pieces = []
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            try:
                pieces.append(unpack_one(named[name], shape).reshape(-1))
            except InvalidPayload as error:
                raise InvalidPayload(f"{name!r}: {error}") from None
        return torch.cat(pieces)


def needs_of(server: Server) -> str:
    """What the strategy needs from devices besides a trained model; empty if nothing."""
    strategy, spec = server.strategy, server.spec
    if strategy.needs:
        return f"reports from devices ({strategy.needs})"
    if strategy.inverts:
        return "the exact training program of the devices"
    asked = {
        "feedback on the model": spec.feedback,
        "the loss before training": spec.report_loss,
        "devices that keep state between tasks": spec.needs_memory,
        "clipped gradients": spec.clip > 0,
        "training of the output layer only": spec.last_layer_only,
    }
    for what, wanted in asked.items():
        if wanted:
            return what
    if server.parts.broadcasts:
        return "devices that receive newer models while they train"
    return ""
