"""Models as one flat float32 vector with a layout: names, shapes and offsets."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

CHUNK = 1 << 20  # 4 MB: measured, see benchmarks/aggregation.py


@dataclass(frozen=True)
class Layout:
    """Where each named parameter lies in the flat vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, module: nn.Module) -> "Layout":
        named = list(module.named_parameters())
        return cls(
            tuple(name for name, _ in named), tuple(tuple(value.shape) for _, value in named)
        )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def size(self) -> int:
        return sum(self.sizes)

    def span(self, name: str) -> slice:
        """The part of the vector that holds the parameter `name`."""
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
