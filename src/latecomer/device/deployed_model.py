"""The deployed model of a device: the model of its last task, stored on disk and personalised.

It is a file in the device's state folder: any program on the device can load it between tasks.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from latecomer.core.messages import ServingSettings, TrainSpec
from latecomer.device.disk import replace_file, unshared
from latecomer.device.flat import FlatModel
from latecomer.device.networks import Networks
from latecomer.device.personalisation import personalise
from latecomer.errors import BadInput

FILE = "model.safetensors"
FORMAT = 4


@dataclass(frozen=True, slots=True, eq=False)
class DeployedModel:
    """Maps examples to logits: those of `network` at `params`, plus `output_bias`."""

    network: FlatModel
    params: Tensor
    settings: ServingSettings
    output_bias: Tensor

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        return self.network.logits(self.params, x) + self.output_bias


def save_deployed_model(
    folder: Path, params: Tensor, submodel: str, settings: ServingSettings, spec: TrainSpec
) -> None:
    """Store the model of a task, the serving settings and the training program of the task."""
    parts = {"submodel": submodel, "settings": asdict(settings), "spec": asdict(spec)}
    metadata = {"model": json.dumps({"format": FORMAT, **parts})}
    replace_file(folder / FILE, save(unshared({"params": params}), metadata))


def load_deployed_model(
    folder: Path, networks: FlatModel | Networks, x: Tensor, y: Tensor
) -> DeployedModel:
    """The model stored in `folder`, personalised with the device's training examples (x, y).

    BadInput if there is none, or if it does not belong to these networks.
    """
    networks = networks if isinstance(networks, Networks) else Networks(networks)
    path = folder / FILE
    if not path.exists():
        raise BadInput(f"{path}: this device has not finished a task yet")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            params = file.get_tensor("params")
        document = json.loads(metadata.get("model", '{"format": 1}'))
        if document["format"] != FORMAT:
            raise BadInput(
                f"{path}: format {document['format']}, this version reads {FORMAT};"
                " the device's next task replaces it"
            )
        network = networks.named(document["submodel"])
        settings = ServingSettings(**{k: _frozen(v) for k, v in document["settings"].items()})
        spec = TrainSpec(**document["spec"])
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{path}: the model is damaged: {error}") from error
    if network is None or params.numel() not in (network.layout.size, network.whole.size):
        raise BadInput(f"{path}: the model of {params.numel():,} parameters is of another network")
    found = personalise(network, params, settings, spec, x, y)
    return DeployedModel(network, found.params, settings, found.output_bias)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
