"""`latecomer deploy new`: writes a Flower app for a model and a data source."""

import inspect
import re
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from string import Template

from latecomer.errors import BadInput
from latecomer.loading import load_callable

APP_FILES = ("__init__", "task", "client_app", "server_app")
RESERVED = {"flwr", "latecomer", "torch", "test", "site"}


def make_app(folder: Path, model: str, data: str) -> Iterator[str]:
    """Write the app to a new or empty folder; yields what to do with it, line by line."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder}: is not empty; name a new folder")
    name, package = names_for(folder.resolve().name)
    source, path = parse_data(data)
    shape, classes = _shape_of(source, path)
    copied = _check_model(model, shape, classes)
    values = {
        "name": name,
        "package": package,
        "model": _quoted(f"{package}.{model}" if copied else model),
        "shape": repr(shape),
        "classes": str(classes),
        "data": ", ".join(_quoted(part) for part in (source, path) if part),
    }
    (folder / package).mkdir(parents=True, exist_ok=True)
    _write(folder / "pyproject.toml", values)
    for file in APP_FILES:
        _write(folder / package / f"{file}.py", values)
    if copied is not None:
        shutil.copy(copied, folder / package / copied.name)
    yield f"{folder}: a Flower app; your model and data are in {folder / package / 'task.py'}"
    yield f"try it:   latecomer deploy up {folder} --devices 3 --tls"
    yield f"simulate: flwr run {folder}   (needs flwr[simulation])"


def names_for(folder: str) -> tuple[str, str]:
    """App name, of letters, digits and hyphens, and package name, both from the folder's name."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.lower()).strip("-")
    if not name or not name[0].isalpha():
        raise BadInput(f"{folder!r}: the folder's name must begin with a letter; it names the app")
    package = name.replace("-", "_")
    return name, f"{package}_app" if package in RESERVED or package in APP_FILES else package


def parse_data(text: str) -> tuple[str, str]:
    """The source and path in NAME, NAME:PATH or FILE.npz; no path is an empty text."""
    if text.endswith(".npz") and ":" not in text:
        return "npz", str(Path(text).resolve())
    source, _, path = text.partition(":")
    return source, str(Path(path).expanduser().resolve()) if path else ""


def _shape_of(source: str, path: str) -> tuple[tuple[int, ...], int]:
    from latecomer.data.sources import load_dataset

    found = load_dataset(source, path)
    return tuple(int(size) for size in found.x.shape[1:]), found.num_classes


def _check_model(model: str, shape: tuple[int, ...], classes: int) -> Path | None:
    """BadInput if the model does not fit the data; the file of the model to copy into the app."""
    from latecomer.device.flat import flat_model

    flat_model(model, shape, classes)
    if ":" not in model:
        return None
    place = model.partition(":")[0]
    file = Path(inspect.getfile(inspect.unwrap(load_callable(model, "model")))).resolve()
    # Devices have installed packages, but not a file of this folder.
    is_here = "." not in place and file == Path(f"{place}.py").resolve()
    if is_here and file.stem in APP_FILES:
        raise BadInput(f"model '{model}': the app has a {file.name} of its own; rename yours")
    return file if is_here else None


def _write(path: Path, values: dict[str, str]) -> None:
    template = files("latecomer.deploy") / "template" / f"{path.name}.txt"
    text = Template(template.read_text(encoding="utf-8")).substitute(values)
    path.write_text(text, encoding="utf-8")


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
