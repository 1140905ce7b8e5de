"""Recordings cut into windows of equal length."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from latecomer.errors import BadInput


def check_windowing(where: str, length: int, step: int) -> None:
    if length < 1 or step < 1:
        raise BadInput(
            f"{where}: data.length = {length} and data.step = {step}; both must be 1 or more"
        )


def windows(recording: NDArray[np.float32], length: int, step: int) -> NDArray[np.float32]:
    """(n, length, channels): every `step` samples one window; a rest that fills none is left."""
    if len(recording) < length:
        return np.empty((0, length, recording.shape[1]), dtype=np.float32)
    seen = sliding_window_view(recording, length, axis=0)[::step]
    return np.ascontiguousarray(seen.transpose(0, 2, 1), dtype=np.float32)
