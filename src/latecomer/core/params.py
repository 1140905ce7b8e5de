"""Models as one flat float32 vector with a layout: names, shapes and offsets."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

CHUNK = 1 << 20  # 4 MB: measured, see benchmarks/aggregation.py


@dataclass(frozen=True)
class Layout:
    """Where each named tensor lies in the flat vector: parameters, then `buffers` buffers."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    buffers: int = 0

    @classmethod
    def of(cls, module: nn.Module, buffers: Sequence[str] = ()) -> "Layout":
        """The layout of the module's trainable parameters and of the named buffers.

        A parameter that several layers share is in it once, under its first name.
        """
        trained = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
        named = [*trained, *((name, module.get_buffer(name)) for name in buffers)]
        shapes = tuple(tuple(value.shape) for _, value in named)
        return cls(tuple(name for name, _ in named), shapes, len(buffers))

    @cached_property
    def trained(self) -> int:
        """The number of values that are parameters; those of buffers follow them."""
        return sum(self.sizes[: len(self.names) - self.buffers])

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def size(self) -> int:
        return sum(self.sizes)

    def span(self, name: str) -> slice:
        """The part of the vector that holds the tensor `name`."""
        position = self.names.index(name)
        start = sum(self.sizes[:position])
        return slice(start, start + self.sizes[position])

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A new vector with the named tensors in layout order."""
        return torch.cat([tensors[name].detach().reshape(-1).float() for name in self.names])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Named views into `vector`; no copy, and gradients flow through."""
        pieces = torch.split(vector, list(self.sizes))
        return {
            name: piece.view(shape)
            for name, piece, shape in zip(self.names, pieces, self.shapes, strict=True)
        }


def chunks(size: int) -> Iterator[slice]:
    """Pieces of a vector that stay in the cache while several operations pass over them."""
    for start in range(0, size, CHUNK):
        yield slice(start, min(start + CHUNK, size))


def digest(vectors: Iterable[Tensor]) -> str:
    """sha256 over the bytes of the vectors, in order."""
    sha = hashlib.sha256()
    for vector in vectors:
        sha.update(vector.detach().contiguous().numpy().tobytes())
    return sha.hexdigest()
