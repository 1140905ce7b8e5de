"""Sensor recordings cut into sliding windows of equal length."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from latecomer.data.dataset import SourceOptions
from latecomer.errors import BadInput


def window_size(where: str, options: SourceOptions, length: int, step: int) -> tuple[int, int]:
    """Window length and step in samples: `options`, else the defaults `length` and `step`.

    An unset step keeps the default ratio of step to length.
    """
    chosen = options.length or length
    chosen_step = options.step or max(1, chosen * step // length)
    if chosen < 1 or chosen_step < 1:
        raise BadInput(
            f"{where}: data.length = {chosen} and data.step = {chosen_step}; both must be 1 or more"
        )
    return chosen, chosen_step


def sliding_windows(recording: NDArray[np.float32], length: int, step: int) -> NDArray[np.float32]:
    """(n, length, channels): one window every `step` samples; an incomplete last one is dropped."""
    if len(recording) < length:
        return np.empty((0, length, recording.shape[1]), dtype=np.float32)
    views = sliding_window_view(recording, length, axis=0)[::step]
    return np.ascontiguousarray(views.transpose(0, 2, 1), dtype=np.float32)


def covered_samples(windows: int, length: int, step: int) -> int:
    """The number of samples from the start of the first to the end of the last window."""
    return (windows - 1) * step + length if windows else 0
