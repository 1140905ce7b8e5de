"""Reader of a folder of images: class/image, device/class/image, or train and test folders."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from latecomer.data.dataset import Dataset, SourceOptions, as_images
from latecomer.data.stored import IN_MEMORY_BYTES, Indices, StoredInputs
from latecomer.data.tables import check_names
from latecomer.errors import BadInput

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
MODES = {"grey": "L", "rgb": "RGB"}


def read_folder(path: Path, options: SourceOptions) -> Dataset:
    """The images below `path`; the folder of an image is its class.

    A folder above the class is the device (`subject`), or all of them are `train` and `test`.
    `options.size` scales images to so many pixels in both directions; without it all must have the
    size of the first. `options.variant` is "grey" or "rgb", by default as the first image. Inputs
    of more than IN_MEMORY_BYTES are read by image when they are used.
    """
    if not path.is_dir():
        raise BadInput(f"{path}: is a file; expected a folder of images, one folder per class")
    check_names("data.variant", [options.variant] if options.variant else [], MODES)
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
    if not files:
        raise BadInput(f"{path}: no image below it; expected one folder of images per class")
    parts = [file.relative_to(path).parts for file in files]
    levels = {len(each) for each in parts}
    if levels not in ({2}, {3}):
        odd = min(files, key=lambda file: len(file.relative_to(path).parts))
        raise BadInput(
            f"{path}: images are {', '.join(str(n - 1) for n in sorted(levels))} folders deep, such"
            f" as {odd}; expected class/image or device/class/image for all"
        )
    above = [each[0] for each in parts] if levels == {3} else []
    split = {*above} == {"train", "test"}
    reader = _Images(files, options)
    return Dataset(
        x=reader.inputs(),
        y=np.array([each[-2] for each in parts]),
        subject=np.array(above) if above and not split else None,
        test=np.array([name == "test" for name in above]) if split else None,
        where=str(path),
    )


class _Images:
    """Reads image files as arrays of one shape."""

    def __init__(self, files: Sequence[Path], options: SourceOptions) -> None:
        self._files = files
        first = _open(files[0])
        grey = first.mode in ("1", "L", "I", "F", "LA") or first.mode.startswith("I;")
        self._mode = MODES[options.variant] if options.variant else ("L" if grey else "RGB")
        self._scaled = options.size > 0
        self._size = (options.size, options.size) if self._scaled else first.size

    def inputs(self) -> NDArray[Any] | StoredInputs:
        """All images in memory as uint8, or inputs that are read when they are used."""
        shape = (len(self._files), *self._read(0).shape)
        if 4 * np.prod(shape) <= IN_MEMORY_BYTES:
            return np.stack([self._read(row) for row in range(len(self._files))])
        return StoredInputs(self._rows, shape, np.dtype(np.uint8)).converted(as_images)

    def _rows(self, rows: Indices) -> NDArray[np.uint8]:
        return np.stack([self._read(row) for row in rows.tolist()])

    def _read(self, row: int) -> NDArray[np.uint8]:
        """(h, w) of a grey image, (3, h, w) of one with colours."""
        image = _open(self._files[row])
        if image.size != self._size:
            if not self._scaled:
                raise BadInput(
                    f"{self._files[row]}: {image.size[0]} x {image.size[1]} pixels, the first image"
                    f" has {self._size[0]} x {self._size[1]}; give data.size to scale them all"
                )
            image = image.resize(self._size)
        pixels = np.asarray(image.convert(self._mode), dtype=np.uint8)
        return pixels if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _open(path: Path) -> "Image.Image":
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise BadInput(
            "data.source = 'folder' needs Pillow: pip install 'latecomer[images]'"
        ) from None
    try:
        with Image.open(path) as image:
            image.load()
            return image
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise BadInput(f"{path}: is not a readable image ({type(error).__name__})") from None
