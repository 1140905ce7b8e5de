"""State as JSON and tensors, for checkpoints; no pickle.

`encode` turns nested plain values, tensors and registered dataclasses into a JSON tree and a dict
of named tensors. A tensor that occurs twice is stored once and shared again by `decode`.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any, cast

import torch
from torch import Tensor

from latecomer.core import messages

_KNOWN: dict[str, type] = {
    name: cls for name, cls in vars(messages).items() if isinstance(cls, type) and is_dataclass(cls)
}


def portable(cls: type) -> type:
    """Class decorator: registers a dataclass or named tuple whose instances may be in a state."""
    _KNOWN[cls.__name__] = cls
    return cls


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}

    def encode(self, value: Any) -> Any:
        if isinstance(value, float) and not isfinite(value):
            return {"float": str(value)}  # JSON has no such number
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            return {"tensor": self._name(value)}
        name = type(value).__name__
        if _KNOWN.get(name) is type(value):
            names = getattr(value, "_fields", None) or [f.name for f in fields(cast(Any, value))]
            return {"type": name, "fields": {n: self.encode(getattr(value, n)) for n in names}}
        if isinstance(value, list | tuple):
            items = [self.encode(item) for item in value]
            return items if isinstance(value, list) else {"tuple": items}
        if isinstance(value, set):
            return {"set": [self.encode(item) for item in sorted(value)]}
        if isinstance(value, Mapping):
            return {"map": [[self.encode(k), self.encode(v)] for k, v in value.items()]}
        raise TypeError(f"a state cannot hold {type(value).__qualname__}")

    def _name(self, tensor: Tensor) -> str:
        # id() is safe as a key: self.tensors keeps every tensor alive.
        name = self._names.get(id(tensor))
        if name is None:
            name = self._names[id(tensor)] = f"t{len(self.tensors)}"
            self.tensors[name] = tensor
        return name


def encode(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """The JSON tree of `value`, and its tensors by name."""
    encoder = _Encoder()
    tree = encoder.encode(value)
    return tree, encoder.tensors


def decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `encode` was given."""
    if isinstance(tree, list):
        return [decode(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "float" in tree:
        return float(tree["float"])
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "tuple" in tree:
        return tuple(decode(item, tensors) for item in tree["tuple"])
    if "set" in tree:
        return {decode(item, tensors) for item in tree["set"]}
    if "map" in tree:
        return {decode(k, tensors): decode(v, tensors) for k, v in tree["map"]}
    values = {name: decode(v, tensors) for name, v in tree["fields"].items()}
    return _KNOWN[tree["type"]](**values)


def storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that own exactly their memory, which safetensors requires."""
    return {
        name: t.clone(memory_format=torch.contiguous_format)
        if t.untyped_storage().nbytes() != t.numel() * t.element_size() or not t.is_contiguous()
        else t
        for name, t in tensors.items()
    }
