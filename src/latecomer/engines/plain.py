"""Codec for Flower apps without Latecomer: they receive a model and return a trained one.

The messages are those of Flower's strategies: the arrays of a model and a config, and in the
reply arrays of the same names and `num-examples`. A device is identified by its node. Its delta is
the returned model minus the model of the task.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from latecomer.core.arrays import ArrayLayout
from latecomer.core.messages import ServingSettings, Task, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.engines.task_codec import TaskCodec
from latecomer.engines.wire import (
    PLAIN,
    Introduction,
    InvalidPayload,
    Packed,
    Payload,
    check_metrics,
    pack_array,
    quoted,
    unpack_array,
)
from latecomer.errors import BadInput
from latecomer.strategies.recipe import recipes

EXAMPLES, EPOCHS, PROXIMAL, ROUND = "num-examples", "local-epochs", "proximal-mu", "server-round"
FLOATS = ("float16", "float32", "float64")  # a device may return an averaged array as any of these

# Strategies that need more than arrays from devices: the nearest one that does not.
NEAREST = {
    "aso-fed": "fedasync",
    "asyncfeded": "fedasync",
    "centralised": "fedavg",
    "clusterfl": "fedavg",
    "dp-fedasync": "fedasync",
    "echopfl": "fedasync",
    "feddc": "semi-async",
    "feddc-fedasync": "fedasync",
    "feddc-fedbuff": "fedbuff",
    "fedsea": "semi-async",
    "heterofl": "fedavg",
    "ifca": "fedavg",
    "latecomer": "latecomer with compensate = false",
    "oort": "fedavg",
    "paflm": "fedasync",
    "privaasyncfed": "fedasync",
    "standalone": "fedavg",
    "unstale": "semi-async",
}


class PlainFlowerCodec(TaskCodec):
    """Encodes tasks for any Flower `ClientApp` whose train function takes and returns arrays.

    arrays: names, dtypes and shapes of the model.
    config: sent with every task. `server-round` is added to it, `proximal-mu` if the strategy has
        a proximal term; a `local-epochs` in it follows the strategy.
    round_of: the present round, from 1.
    """

    def __init__(
        self,
        arrays: ArrayLayout,
        config: Mapping[str, Any] | None = None,
        round_of: Callable[[], int] = lambda: 1,
    ) -> None:
        self.arrays, self.config, self.round_of = arrays, dict(config or {}), round_of

    def check(self, server: Server) -> None:
        size = server.store.head_params().numel()
        if size != self.arrays.layout.size:
            expected = self.arrays.layout.size
            raise BadInput(f"the server's model has {size} values, the layout {expected}")
        if needs := needs_of(server, self.config):
            name = server.strategy.name
            nearest = f"the nearest that does not is {NEAREST[name]}; " if name in NEAREST else ""
            raise BadInput(
                f"strategy {name!r} needs {needs}, which a Flower app that does not run Latecomer"
                f" cannot give; {nearest}or use latecomer's client_app"
            )

    def known(self, node: int) -> Introduction:
        """The device is named after its node, which Flower authenticates."""
        return Introduction(f"node-{node}", f"node-{node}")

    def encode(
        self, task: Task, key: str, run: str, until: int = 0, serving: ServingSettings = PLAIN
    ) -> Payload:
        return self.task_payload(task, self.round_of())

    def task_payload(self, task: Task, number: int) -> Payload:
        """The message of a task in the round of this number."""
        config = {**self.config, ROUND: number}
        if EPOCHS in config:
            config[EPOCHS] = task.spec.local_epochs
        if task.spec.prox:
            config[PROXIMAL] = task.spec.prox
        return self.payload(task.params, task.unaveraged, config)

    def payload(
        self, params: Tensor, unaveraged: Mapping[str, Tensor], config: Mapping[str, Any]
    ) -> Payload:
        """A message with a model and a config."""
        arrays = self.arrays.join(params, unaveraged)
        return Payload(config, named={name: pack_array(each) for name, each in arrays.items()})

    def decode(self, payload: Payload, task: Task, key: str, newer: Mapping[int, str]) -> Update:
        trained, unaveraged = self._model(payload.named)
        examples, metrics = decode_metrics(payload)
        return Update(task.id, trained.sub_(task.params), examples, metrics, unaveraged=unaveraged)

    def _model(self, named: Mapping[str, Packed]) -> tuple[Tensor, dict[str, Tensor]]:
        """The arrays as by `ArrayLayout.split`; InvalidPayload unless they are those of the model.

        An averaged array may have another float dtype than the one that was sent.
        """
        layout = self.arrays
        if set(named) != set(layout.names):
            unknown = sorted(set(named) - set(layout.names))
            missing = sorted(set(layout.names) - set(named))
            what = f"{quoted(unknown[0])} is unknown" if unknown else f"{missing[0]!r} is missing"
            raise InvalidPayload(f"the arrays are not those of the model: {what}")
        found: dict[str, np.ndarray] = {}
        for name, dtype, shape in zip(layout.names, layout.dtypes, layout.shapes, strict=True):
            try:
                allowed = FLOATS if dtype in FLOATS else (dtype,)
                found[name] = unpack_array(named[name], shape, allowed)
            except InvalidPayload as error:
                raise InvalidPayload(f"{name!r}: {error}") from None
        return layout.split(found)


def decode_metrics(payload: Payload) -> tuple[int, dict[str, Any]]:
    """The number of examples and the single numbers among the metrics of a reply.

    Flower's records may also hold lists of numbers, which are left out.
    """
    found = dict(payload.metrics)
    check_metrics(found)
    if EXAMPLES not in found:
        raise InvalidPayload(f"{EXAMPLES!r} is missing in its MetricRecord")
    examples = found.pop(EXAMPLES)
    if isinstance(examples, float) and examples.is_integer():
        examples = int(examples)
    return examples, {name: value for name, value in found.items() if not isinstance(value, list)}


def spec_of(config: Mapping[str, Any]) -> TrainSpec:
    """What the server knows of the local training: common keys of the config, else defaults."""

    def given(default: Any, *keys: str) -> Any:
        values = (config[key] for key in keys if key in config)
        kind = type(default)
        return next((value for value in values if type(value) is kind and value > 0), default)

    plain = TrainSpec()
    return replace(
        plain,
        lr=given(plain.lr, "lr", "learning-rate"),
        local_epochs=given(plain.local_epochs, EPOCHS),
        batch_size=given(plain.batch_size, "batch-size"),
    )


def needs_of(server: Server, config: Mapping[str, Any] | None = None) -> str:
    """What the strategy needs from devices besides a trained model; empty if nothing.

    With `local-epochs` in the `config` of the tasks, devices follow the strategy's local epochs.
    """
    strategy, spec = server.strategy, server.spec
    recipe = recipes().get(strategy.name)
    asked = {
        f"reports from devices ({strategy.needs})": bool(strategy.needs),
        "the exact training program of the devices": strategy.inverts,
        "the network of the devices on the server": strategy.needs_classes,
        "feedback on the model": spec.feedback,
        "the loss before training": spec.report_loss,
        "devices that keep state between tasks": spec.needs_memory,
        "clipped gradients": spec.clip > 0,
        "training of the output layer only": spec.last_layer_only,
        f"devices that read {EPOCHS!r} from train_config": (
            strategy.varies_epochs and EPOCHS not in (config or {})
        ),
        "devices that receive newer models while they train": server.parts.broadcasts,
        "several models": strategy.personal,
    }
    if recipe is not None:
        asked |= {
            "a simulation (it is a reference to compare with)": (
                recipe.pooled or recipe.punctual or recipe.paper == "reference"
            ),
            "devices that train sub-models": recipe.widths,
            "privacy on the devices": recipe.private,
        }
    return next((what for what, wanted in asked.items() if wanted), "")
