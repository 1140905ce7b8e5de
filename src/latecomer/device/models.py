"""The registry of built-in models, and the construction of a network from its name."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from latecomer.device import zoo
from latecomer.device.custom import made_by
from latecomer.device.zoo import Shape
from latecomer.errors import BadInput, unknown
from latecomer.loading import first_line, load_callable


@dataclass(frozen=True)
class ModelInfo:
    """A built-in model: `fits` tests an input shape, `takes` describes those that fit."""

    name: str
    summary: str
    build: Callable[[Shape, int, Sequence[int], float], nn.Module]
    takes: str
    fits: Callable[[Shape], bool]


MODELS: dict[str, ModelInfo] = {
    info.name: info
    for info in (
        ModelInfo(
            "mlp",
            "fully connected with ReLU; flattens any input; hidden sets the widths",
            zoo.mlp,
            "any shape",
            lambda shape: True,
        ),
        ModelInfo(
            "cnn1d",
            "two 1-D convolutions and a linear layer, for time series and flat features",
            zoo.cnn1d,
            "series (steps, channels) or features (n,)",
            lambda shape: len(shape) in (1, 2),
        ),
        ModelInfo(
            "lenet",
            "LeNet-5, for small grey or colour images",
            zoo.lenet,
            "images (channels, height, width) of at least 4x4",
            lambda shape: len(shape) == 3 and min(shape[1:]) >= zoo.MIN_LENET_SIDE,
        ),
        ModelInfo(
            "resnet18",
            "ResNet-18 with GroupNorm, for images",
            zoo.resnet18,
            "images (channels, height, width)",
            lambda shape: len(shape) == 3,
        ),
    )
}


def label_of(model: str | nn.Module | Callable[..., nn.Module]) -> str:
    """How messages call a model that is given by name, as a module or as a callable."""
    if isinstance(model, str):
        return f"model '{model}'"
    return f"model '{getattr(model, '__name__', type(model).__name__)}'"


def build_model(
    name: str | nn.Module | Callable[..., nn.Module],
    input_shape: Shape,
    num_classes: int,
    hidden: Sequence[int] = (64, 32),
    width: float = 1.0,
) -> nn.Module:
    """The network called `name`, or a user's own; BadInput if there is none.

    A user's own is a `module:callable`, a callable, or a module, which is copied with its weights.
    `hidden` is for mlp only. Initial weights come from the global torch generator.
    """
    if not 0 < width <= 1:
        raise BadInput(f"model width {width:g}: must be above 0 and at most 1")
    if isinstance(name, nn.Module):
        if width != 1:
            raise BadInput(
                f"{label_of(name)}: width {width:g} needs a callable that takes width=, not a"
                " module; submodels.level = 'none' gives every device the whole model"
            )
        try:
            return copy.deepcopy(name)
        except Exception as error:  # e.g. a lazy BatchNorm, or a lock in the module
            raise BadInput(
                f"{label_of(name)}: the module cannot be copied; give a function that makes it:"
                f" {first_line(error)}"
            ) from error
    if not isinstance(name, str):
        return made_by(name, label_of(name), input_shape, num_classes, width)
    if ":" in name:
        build = load_callable(name, "model")
        return made_by(build, label_of(name), input_shape, num_classes, width)
    if name not in MODELS:
        raise unknown("model", name, MODELS, "your own as module:callable")
    info = MODELS[name]
    if not info.fits(input_shape):
        fitting = [other.name for other in MODELS.values() if other.fits(input_shape)]
        raise BadInput(
            f"model '{name}' takes {info.takes}, not shape {input_shape}; "
            f"for this shape use {' or '.join(fitting)}"
        )
    return info.build(input_shape, num_classes, hidden, width)
