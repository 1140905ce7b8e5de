"""What `latecomer data` shows: the data of a config, as text and as a picture."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latecomer.data.dataset import Dataset, describe_target
from latecomer.data.federated_dataset import FederatedDataset, missing_values
from latecomer.data.stored import StoredInputs
from latecomer.errors import BadInput
from latecomer.study.config import Config
from latecomer.study.given import Given
from latecomer.study.local_data import late_devices, load_federated, read_data

BAR = 40  # characters of the longest bar
MAX_BARS = 24
BINS = 10  # of numbers, and of many devices by their examples
PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, eq=False)
class DataView:
    """The data of a config before a model is built.

    `counts` is (rows, devices): the examples of each class, the examples that have each label, or
    the examples in BINS equal bins of a number; else all examples. All parts of a device count,
    without the replicas of augmentation.
    """

    config: Config
    dataset: Dataset
    federation: FederatedDataset
    late: tuple[int, ...]
    row_names: tuple[str, ...]
    counts: NDArray[np.int64]
    examples: NDArray[np.int64]  # by device

    def lines(self) -> Iterator[str]:
        """The text that is printed."""
        data, federation = self.dataset, self.federation
        stored = ", read by row when they are used" if isinstance(data.x, StoredInputs) else ""
        tokens = data.x.dtype.kind == "i"
        yield f"source     {self.config.data.source} {self.config.data.path}".rstrip()
        yield f"examples   {len(data):,}"
        shape = ", ".join(map(str, data.x.shape[1:]))
        yield f"inputs     ({shape}) {'integers, not scaled' if tokens else 'numbers'}{stored}"
        if missing := missing_values(data.x):
            share = missing / np.prod(data.x.shape)
            yield f"missing    {missing:,} values of the inputs ({share:.2%})"
        yield f"targets    {self._targets()}"
        yield (
            f"devices    {len(self.examples)} ({self.config.data.partition}), examples: min "
            f"{self.examples.min()}, median {np.median(self.examples):g}, max {self.examples.max()}"
        )
        yield (
            f"parts      {sum(len(c.train.y) for c in federation.clients):,} training (with"
            f" replicas), {len(federation.validation.y):,} validation, {len(federation.test.y):,}"
            f" central test ({self.config.data.test})"
        )
        yield from (f"note       {note}" for note in federation.notes)
        if len(self.row_names) > 1:
            yield f"\n{self._rows()}"
            yield from _bars(self.row_names, self.counts.sum(axis=1))
        yield "\nexamples of each device"
        yield from self._devices()
        if self.late:
            yield "\nlate devices and what they hold most of"
            yield from self._late()

    def _rows(self) -> str:
        if self.dataset.has_classes:
            return "examples of each class"
        return "examples with each label" if self.dataset.y.ndim == 2 else "examples by target"

    def _targets(self) -> str:
        y = self.dataset.y
        if self.dataset.has_classes:
            return f"{self.dataset.num_classes} classes"
        found = describe_target(y)
        if y.dtype.kind != "f":
            return f"{found}, {self.dataset.num_outputs} different tokens"
        known = y[~np.isnan(y)]
        unknown = f", {np.isnan(y).mean():.1%} missing" if len(known) < y.size else ""
        if y.ndim == 2 and np.isin(known, (0, 1)).all():
            return f"{y.shape[1]} labels: {known.mean():.1%} of the known are 1{unknown}"
        values = f"mean {known.mean():.4g}, std {known.std():.4g}"
        return f"{found}: {values}, {known.min():.4g} to {known.max():.4g}{unknown}"

    def _devices(self) -> Iterator[str]:
        late = {*self.late}
        if len(self.examples) <= MAX_BARS:
            names = [f"{d}{' late' if d in late else ''}" for d in range(len(self.examples))]
            yield from _bars(names, self.examples)
            return
        least, most = int(self.examples.min()), int(self.examples.max())
        step = ceil((most - least + 1) / BINS)
        begins = range(least, most + 1, step)
        counts = np.bincount((self.examples - least) // step, minlength=len(begins))
        names = [str(n) if step == 1 else f"{n} to {n + step - 1}" for n in begins]
        yield from _bars(names, counts, " devices")

    def _late(self) -> Iterator[str]:
        for device in self.late[:MAX_BARS]:
            held = self.counts[:, device]
            most = np.argsort(-held, kind="stable")[:5]
            parts = ", ".join(f"{self.row_names[r]} ({held[r]})" for r in most if held[r])
            yield f"  device {device}: {parts or 'no examples'}"
        if (more := len(self.late) - MAX_BARS) > 0:
            yield f"  and {more} more"


def data_view(config: Config) -> DataView:
    """Load the data of a config and split them over devices."""
    dataset, config, _ = read_data(config, Given())
    federation = load_federated(config, dataset)
    rows = [
        np.concatenate(
            [np.unique(c.train_rows.numpy()), c.validation_rows.numpy(), c.test_rows.numpy()]
        )
        for c in federation.clients
    ]
    names, of = _row_of(dataset)
    counts = np.stack([of(dataset.y[index]) for index in rows], axis=1)
    return DataView(
        config=config,
        dataset=dataset,
        federation=federation,
        late=late_devices(config, federation),
        row_names=names,
        counts=counts,
        examples=np.array([len(index) for index in rows]),
    )


def _row_of(dataset: Dataset) -> tuple[tuple[str, ...], Any]:
    """The names of the rows of `DataView.counts`, and a function that counts a device's targets."""
    y = dataset.y
    if dataset.has_classes:
        return dataset.class_names, lambda part: np.bincount(part, minlength=dataset.num_classes)
    if y.dtype.kind == "f" and y.ndim == 2 and y.shape[1] > 1:
        names = dataset.class_names or tuple(str(label) for label in range(y.shape[1]))
        return names, lambda part: (np.nan_to_num(part) > 0).sum(axis=0)
    if y.dtype.kind == "f" and y[0].size == 1:
        edges = np.histogram_bin_edges(y, bins=BINS)
        names = tuple(f"{a:.3g} to {b:.3g}" for a, b in pairwise(edges))
        return names, lambda part: np.histogram(part, bins=edges)[0]
    return ("examples",), lambda part: np.array([len(part)])


def _bars(names: Sequence[str], values: NDArray[np.int64], unit: str = "") -> Iterator[str]:
    """A line with a bar for each name, at most MAX_BARS."""
    width = max(len(name) for name in names[:MAX_BARS])
    largest = max(int(values.max()), 1)
    for name, value in zip(names[:MAX_BARS], values.tolist(), strict=False):
        bar = "█" * max(round(BAR * value / largest), int(value > 0))
        yield f"  {name:<{width}}  {bar} {value:,}{unit}"
    if (more := len(names) - MAX_BARS) > 0:
        yield f"  and {more} more with {int(values[MAX_BARS:].sum()):,}"


def write_picture(view: DataView, path: Path) -> Path:
    """A heat map: the classes (or what `DataView.counts` has) of each device; late ones marked."""
    if path.suffix not in PICTURES:
        raise BadInput(f"--out {path}: must end in {', '.join(PICTURES)}")
    if find_spec("matplotlib") is None:
        raise BadInput('--out needs matplotlib: pip install "latecomer[figures]"')
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    rows, devices = view.counts.shape
    size = (min(14.0, 3 + 0.12 * devices), min(12.0, 1.6 + 0.22 * rows))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(view.counts, aspect="auto", cmap="Blues", interpolation="nearest")
    figure.colorbar(image, label="examples")
    axes.set_yticks(range(rows), [name.replace("$", r"\$") for name in view.row_names])
    axes.set_xlabel("device")
    for device in view.late:
        axes.plot(device, rows - 0.4, marker="^", color="#c0392b", clip_on=False, markersize=4)
    late = "; triangles: late devices" if view.late else ""
    title = f"{view.config.data.source}, {view.config.data.partition}{late}"
    axes.set_title(title, fontsize=10, loc="left", parse_math=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise BadInput(f"--out {path}: cannot be written: {error.strerror}") from error
    return path
