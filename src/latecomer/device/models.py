"""The registry of built-in models, and the construction of a network from its name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from latecomer.device import zoo
from latecomer.device.custom import load_module
from latecomer.device.zoo import Shape
from latecomer.errors import BadInput, unknown


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


def build_model(
    name: str,
    input_shape: Shape,
    num_classes: int,
    hidden: Sequence[int] = (64, 32),
    width: float = 1.0,
) -> nn.Module:
    """The network called `name`, or a user's own as `module:callable`; BadInput if there is none.

    `hidden` is for mlp only. Initial weights come from the global torch generator.
    """
    if not 0 < width <= 1:
        raise BadInput(f"model width {width:g}: must be above 0 and at most 1")
    if ":" in name:
        return load_module(name, input_shape, num_classes, width)
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
