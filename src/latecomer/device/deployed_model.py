"""The model that a device uses between its tasks: the last it was sent, made its own.

It lies beside the rest of the device's state, so that any program on the device may use it.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from latecomer.core.messages import ServingSettings
from latecomer.device.disk import replace_file, unshared
from latecomer.device.flat import FlatModel
from latecomer.device.networks import Networks
from latecomer.device.personalisation import interpolated_params, prior_correction, training_errors
from latecomer.errors import BadInput

FILE = "model.safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class DeployedModel:
    """Gives the logits of examples as this device takes them, which adds `offset` to them."""

    network: FlatModel
    params: Tensor
    use: ServingSettings
    offset: Tensor

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        return self.network.logits(self.params, x) + self.offset


def save_deployed_model(
    folder: Path, params: Tensor, change: Tensor | None, submodel: str, use: ServingSettings
) -> None:
    """Put down the model that was sent, and what the device's training has changed in it."""
    told = {"submodel": submodel, "use": asdict(use)}
    tensors = {"params": params} | ({} if change is None else {"change": change})
    replace_file(folder / FILE, save(unshared(tensors), {"told": json.dumps(told)}))


@torch.no_grad()
def load_deployed_model(
    folder: Path, networks: FlatModel | Networks, x: Tensor, y: Tensor
) -> DeployedModel:
    """What the device of this state folder, with these examples, uses.

    BadInput if it has not been sent a model yet.
    """
    networks = networks if isinstance(networks, Networks) else Networks(networks)
    path = folder / FILE
    if not path.exists():
        raise BadInput(f"{path}: this device has not finished a task yet")
    try:
        with safe_open(path, framework="pt") as file:
            told = json.loads(file.metadata()["told"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        network = networks.named(told["submodel"])
        use = ServingSettings(**{name: _frozen(value) for name, value in told["use"].items()})
        sent = tensors["params"]
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise BadInput(f"{path}: the model is damaged: {error}") from error
    if network is None or network.layout.size != sent.numel():
        raise BadInput(f"{path}: the model of {sent.numel():,} parameters is of another network")
    expected = _shares(use.class_prior, 1.0, network)
    offset = _shares(use.output_bias, 0.0, network)
    offset = offset + prior_correction(y, network.num_classes, use.prior_correction, expected)
    errors = training_errors(network.logits, x, y, offset)
    return DeployedModel(
        network,
        interpolated_params(sent, tensors.get("change"), use.interpolation, errors),
        use,
        offset,
    )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _shares(values: Sequence[float], otherwise: float, network: FlatModel) -> Tensor:
    """One value per class; where there are none, or of other classes, the same for all."""
    if len(values) != network.num_classes:
        return torch.full((network.num_classes,), otherwise)
    return torch.tensor(values)
