"""`latecomer export`: the models of a run as files of other programs."""

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from latecomer.device.flat import FlatModel
from latecomer.errors import BadInput
from latecomer.loading import first_line
from latecomer.study.config import load_config
from latecomer.study.experiment import Experiment

Format = Literal["safetensors", "torch", "onnx"]
ENDINGS: dict[Format, str] = {"safetensors": ".safetensors", "torch": ".pt", "onnx": ".onnx"}
ONNX = ("onnx", "onnxscript")


def export(run: Path, kind: Format, out: Path | None = None) -> Iterator[Path]:
    """Write each model of a finished run to `out` (default: RUN/export); yields the paths.

    safetensors: a copy. torch: the state_dict, for `torch.load(path, weights_only=True)`. onnx: the
    network with its weights, in evaluation mode, for inputs (batch, ...) as it was trained on.
    """
    sources = sorted(run.glob("model*.safetensors"))
    if not sources:
        raise BadInput(f"{run}: has no model.safetensors; a run writes it when it ends")
    network = _network(run) if kind == "onnx" else None
    folder = out or run / "export"
    folder.mkdir(parents=True, exist_ok=True)
    for source in sources:
        path = folder / f"{source.stem}{ENDINGS[kind]}"
        if kind == "safetensors":
            shutil.copyfile(source, path)
        elif network is None:
            torch.save(_tensors(source), path)
        else:
            _write_onnx(network, _tensors(source), path)
        yield path


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error


def _network(run: Path) -> FlatModel:
    """The network of a simulated run, built from its config.toml; needs its data for the shapes."""
    missing = [name for name in ONNX if importlib.util.find_spec(name) is None]
    if missing:
        raise BadInput(f"--format onnx needs {' and '.join(missing)}: pip install {' '.join(ONNX)}")
    if not (run / "config.toml").is_file():
        raise BadInput(
            f"{run}: has no config.toml (a deployed run), so its network is unknown; use --format"
            " torch and load the state_dict into your own"
        )
    model = Experiment(load_config(run / "config.toml")).model
    if not isinstance(model, FlatModel):
        raise BadInput(f"{run}: the network is that of a Flower app; use --format torch")
    return model


def _write_onnx(network: FlatModel, tensors: dict[str, Tensor], path: Path) -> None:
    module: nn.Module = network.module.cpu()
    try:
        module.load_state_dict(tensors)
        module.eval()
        torch.onnx.export(
            module,
            (network.example(2).cpu(),),
            path,
            input_names=["input"],
            output_names=["output"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            external_data=False,
            verbose=False,
        )
    except Exception as error:  # a network may have operations that ONNX has not
        raise BadInput(f"{path}: the network cannot be exported: {first_line(error)}") from error
