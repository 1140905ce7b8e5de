"""Reader of shoulder exercises recorded with a smartwatch, a data file of the seglearn package.

D. Burns, N. Leung, M. Hardisty, C. Whyne, P. Henry, S. McLachlin. Shoulder physiotherapy exercise
recognition. Physiological Measurement 39(7), 2018.
"""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from latecomer.data.dataset import Dataset, SourceOptions
from latecomer.data.sliding_windows import covered_samples, sliding_windows, window_size
from latecomer.errors import BadInput

LENGTH, STEP = 100, 50  # samples at 50 Hz: windows of 2 s that overlap by half
FILE = "data/watch_dataset.npy"

# The file holds pickled objects, which can run any code when read. It is read only if it is byte
# for byte the published file, which was inspected.
SHA256 = "eb122f23cdf06ef6bd6c6c5312958ec5cf9d038e2e6d457b8081662c75a42537"


def read_watch(options: SourceOptions) -> Dataset:
    """Windows of 140 recordings: 3 axes of acceleration, 3 of rotation; 10 subjects."""
    length, step = window_size("watch", options, LENGTH, STEP)
    path = _find()
    recorded = _load(path)
    windows = [sliding_windows(np.asarray(series), length, step) for series in recorded["X"]]
    sizes = [len(part) for part in windows]
    if not sum(sizes):
        longest = max(len(series) for series in recorded["X"])
        raise BadInput(f"watch: data.length = {length}; the longest recording has {longest}")
    # Sorted by subject; the recordings of a subject keep their order.
    order = np.argsort(np.repeat(recorded["subject"], sizes), kind="stable")
    rows = sum(len(series) for series in recorded["X"])
    rest = rows - sum(covered_samples(n, length, step) for n in sizes)
    return Dataset(
        x=np.concatenate(windows)[order],
        y=np.repeat(recorded["y"], sizes)[order],
        subject=np.repeat(recorded["subject"], sizes)[order],
        class_names=tuple(recorded["y_labels"]),
        notes=(f"{rest} of {rows} samples at the ends of recordings fill no window",)
        if rest > 0
        else (),
        where=str(path),
    )


def _find() -> Path:
    """The path of the file; the package is not imported, as that would import scikit-learn too."""
    spec = find_spec("seglearn")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        if (path := Path(folder) / FILE).is_file():
            return path
    raise BadInput(
        "data source 'watch' is a file of the package seglearn, which is not installed;"
        " `pip install --no-deps seglearn==1.2.5` installs it (18 MB)"
    )


def _load(path: Path) -> dict[str, Any]:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise BadInput(
            f"{path}: is not the file of seglearn 1.2.5 (sha256 {found[:12]}..., expected"
            f" {SHA256[:12]}...), and holds pickled objects: it is not read;"
            " `pip install --no-deps --force-reinstall seglearn==1.2.5` installs the right one"
        )
    with path.open("rb") as file:
        return dict(np.load(file, allow_pickle=True).item())
