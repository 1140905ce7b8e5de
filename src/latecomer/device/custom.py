"""A user's own network, made by a callable."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import nn

from latecomer.errors import BadInput
from latecomer.loading import first_line


def made_by(
    build: Callable[..., Any],
    label: str,
    input_shape: tuple[int, ...],
    num_classes: int,
    width: float = 1.0,
) -> nn.Module:
    """The network that `build` returns; messages call it `label`.

    The callable gets those of input_shape=, num_classes= and width= that it names, otherwise
    (input_shape, num_classes) if it requires two arguments, otherwise nothing. A width= whose
    default is above 1 is a number of channels of the user's, and left alone.
    """
    is_class = isinstance(build, type)
    if is_class and build.__module__.startswith("torch."):
        raise BadInput(
            f"{label}: is a class of torch; give an instance, such as {build.__name__}(...), or a"
            " function that makes one"
        )
    args, keywords = _arguments(label, build, input_shape, num_classes, width)
    try:
        module = build(*args, **keywords)
    except Exception as error:
        hint = "; it is a class: an instance of it is allowed, too" if is_class else ""
        raise BadInput(f"{label}: calling it failed: {first_line(error)}{hint}") from error
    if not isinstance(module, nn.Module):
        raise BadInput(f"{label}: gave a {type(module).__name__}, but must give a torch.nn.Module")
    return module


def _is_share(default: Any) -> bool:
    """Whether a `width` of this default is a share of all channels, not their number."""
    return default is inspect.Parameter.empty or (isinstance(default, int | float) and default <= 1)


def _arguments(
    label: str, build: Any, input_shape: tuple[int, ...], num_classes: int, width: float
) -> tuple[list[Any], dict[str, Any]]:
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):  # compiled callables have no signature
        return [], {}
    parameters = signature.parameters.values()
    offered = {"input_shape": input_shape, "num_classes": num_classes, "width": width}
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if "width" in by_name and not _is_share(signature.parameters["width"].default):
        by_name.remove("width")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        by_name |= {"input_shape", "num_classes"}
    if width != 1.0 and "width" not in by_name:
        raise BadInput(
            f"{label}: width {width:g} needs a callable that takes width=, "
            f"or one of the built-in models"
        )
    keywords = {key: value for key, value in offered.items() if key in by_name}
    both: tuple[list[Any], dict[str, Any]] = ([input_shape, num_classes], {})
    for args, named in [([], keywords), *([] if keywords else [both])]:
        with suppress(TypeError):
            signature.bind(*args, **named)
            return args, named
    missing = ", ".join(
        p.name for p in parameters if p.default is p.empty and p.name not in keywords
    )
    raise BadInput(
        f"{label}: needs {missing}; it must be callable with input_shape= and "
        f"num_classes=, with those two in order, or with nothing; or give a module that is made"
    )
