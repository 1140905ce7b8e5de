"""The models of a run on disk, as they are to be used."""

from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file

from latecomer.core.messages import MAIN
from latecomer.core.params import Layout
from latecomer.core.server import Server


def write_models(folder: Path, server: Server, lineages: Iterable[str], layout: Layout) -> None:
    """model.safetensors, and model-LINEAGE.safetensors beside it for every other lineage."""
    for lineage in lineages:
        name = "model" if lineage == MAIN else f"model-{lineage}"
        tensors = layout.unflatten(server.model(lineage))
        save_file({key: t.clone() for key, t in tensors.items()}, folder / f"{name}.safetensors")
