"""Writes the models of a run as safetensors files."""

from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file

from latecomer.core.messages import MAIN
from latecomer.core.params import Layout
from latecomer.core.server import Server


def write_models(folder: Path, server: Server, lineages: Iterable[str], layout: Layout) -> None:
    """model.safetensors for the main lineage, model-LINEAGE.safetensors for every other cluster."""
    for lineage in lineages:
        name = "model" if lineage == MAIN else f"model-{lineage}"
        tensors = layout.unflatten(server.model(lineage))
        save_file({key: t.clone() for key, t in tensors.items()}, folder / f"{name}.safetensors")
