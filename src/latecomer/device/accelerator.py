"""The torch device that networks are computed on (`engine.device`)."""

import re

import torch

from latecomer.errors import BadInput

ALLOWED = re.compile(r"auto|cpu|cuda|cuda:\d+|mps")


def torch_device(name: str) -> torch.device:
    """The device of this name; "auto" is cuda where there is one, else cpu.

    BadInput if the name is unknown or this machine has no such device.
    """
    key = f"engine.device = {name!r}"
    if not ALLOWED.fullmatch(name):
        raise BadInput(f"{key}: must be auto, cpu, cuda, cuda:N or mps")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(f"{key}: this machine has {torch.cuda.device_count()} CUDA devices; use cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise BadInput(f"{key}: this machine has no MPS device; use cpu")
    return device
