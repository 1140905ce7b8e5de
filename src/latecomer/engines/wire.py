"""Encoding of tasks, updates and introductions as payloads: fields, metrics and one array.

Independent of Flower, and without pickle. Sizes and types of a received payload are compared with
the expected ones before any value is read; `InvalidPayload` says what is wrong. Whether values are
finite and within bounds is checked by `core.checks`, for every update.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from io import BytesIO
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from latecomer.core.messages import Offer, ServingSettings, Task, TrainSpec, Update
from latecomer.core.submodel import Submodel, name_of

FLOAT32 = "float32"
MAX_HEADER = 256  # bytes before the values of an .npy file
MAX_FINETUNE_EPOCHS = 100  # that a server may ask a device for
MAX_METRICS = 10_000
MAX_NAME = 200  # of a metric, a device, a sub-model or a key

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # of a device

Scalar = bool | int | float | str
PLAIN = ServingSettings()


class InvalidPayload(ValueError):
    """A payload that cannot be used; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Packed:
    """An array as .npy bytes, with the dtype and shape that its sender claims."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(slots=True)
class Payload:
    """The content of one message. A payload from a device has not been checked.

    Devices that run Latecomer get all vectors in one `array`: many small arrays are slow. Other
    Flower apps exchange the `named` arrays of a state_dict.
    """

    fields: Mapping[str, Any]
    metrics: Mapping[str, Any] = field(default_factory=dict)
    array: Packed | None = None
    named: Mapping[str, Packed] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Order:
    """A task as a device receives it.

    key: unique id of the task, also across restarts of the server.
    run: id of the run.
    until: epochs after which the device reports progress and waits; 0: it trains all epochs.
    serving: settings for inference between tasks; only those that are not the default are sent.
    """

    key: str
    run: str
    task: Task
    until: int = 0
    serving: ServingSettings = PLAIN


@dataclass(frozen=True, slots=True)
class ResumeOrder:
    """Order to a device that waits in mid-task: train until `until` epochs are done.

    newer: a newer model to continue from; None: there is none.
    number, name: its number within the task, and its unique id.
    offer: number of the offer of the same lineage; 0: none.
    """

    key: str
    until: int
    number: int = 0
    name: str = ""
    offer: int = 0
    newer: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """A device has trained `passes` epochs of its task.

    `number` and `name` identify the newer model that it continued from; 0 and "": none.
    """

    passes: int
    number: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Introduction:
    """Name of a device, the secret key that proves the name, and its sub-model width (0 to 1]."""

    name: str
    key: str
    width: float = 1.0


def pack(*rows: Tensor) -> Packed:
    """Pack vectors of equal length as the rows of one array."""
    return pack_one(torch.stack([row.detach() for row in rows]))


def pack_one(tensor: Tensor) -> Packed:
    """Pack one tensor in its own shape."""
    return pack_array(tensor.detach().contiguous().numpy())


def pack_array(values: np.ndarray) -> Packed:
    """Pack one array in its own dtype and shape."""
    file = BytesIO()
    np.save(file, values, allow_pickle=False)
    return Packed(str(values.dtype), values.shape, file.getvalue())


def unpack(packed: Packed | None, rows: int, size: int) -> Tensor:
    """The float32 matrix of shape (rows, size); any other is refused before it is read."""
    if packed is None:
        raise InvalidPayload("the array is missing")
    return unpack_one(packed, (rows, size))


def unpack_one(packed: Packed, shape: tuple[int, ...]) -> Tensor:
    """The float32 tensor of this shape; any other is refused before it is read."""
    return torch.from_numpy(unpack_array(packed, shape, (FLOAT32,)))


def unpack_array(packed: Packed, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> np.ndarray:
    """The array of this shape and one of these dtypes; any other is refused before it is read."""
    if packed.dtype not in dtypes:
        allowed = " or ".join(dtypes)
        raise InvalidPayload(f"the array is of {quoted(packed.dtype)}, must be {allowed}")
    if tuple(packed.shape) != shape:
        raise InvalidPayload(f"the array has shape {quoted(packed.shape)}, must be {shape}")
    dtype = np.dtype(packed.dtype)
    expected = dtype.itemsize * prod(shape)
    if not isinstance(packed.data, bytes) or len(packed.data) > expected + MAX_HEADER:
        raise InvalidPayload(f"the array has more bytes than {_product(shape)} values take")
    if len(packed.data) < expected:
        raise InvalidPayload("the array's bytes do not match its dtype and shape")
    values = packed.data[len(packed.data) - expected :]
    # Only the header is parsed by numpy: `np.load` would allocate any shape that it claims.
    fortran = _header(packed.data[: len(packed.data) - expected], shape, packed.dtype)
    if fortran is None:
        raise InvalidPayload("the array's bytes do not match its dtype and shape")
    order: Literal["F", "C"] = "F" if fortran else "C"
    found = np.frombuffer(values, dtype=dtype.newbyteorder("<")).reshape(shape, order=order)
    return np.array(found, dtype=dtype, order="C")


def _header(head: bytes, shape: tuple[int, ...], name: str) -> bool | None:
    """Whether the values are in Fortran order; None if the header does not match."""
    file = BytesIO(head)
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            return None
        found, fortran, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=256)
    except Exception:  # numpy parses the header as Python text and raises many types
        return None
    if file.tell() != len(head) or dtype.byteorder == ">" or dtype.name != name:
        return None
    return bool(fortran) if found == shape else None


def _product(shape: tuple[int, ...]) -> str:
    return " x ".join(str(size) for size in shape) or "1"


def encode_task(
    task: Task, key: str, run: str = "", until: int = 0, serving: ServingSettings = PLAIN
) -> Payload:
    """A task and all models that the device may start from, as rows of one array; see `Order`."""
    entries: dict[str, Any] = {
        "task": key,
        "run": run,
        "device": task.device,
        "number": task.number,
        "models": 1 + len(task.offers),
        "submodel": name_of(task.submodel),
    }
    if until:
        entries["until"] = until
    entries |= {f"spec.{f.name}": getattr(task.spec, f.name) for f in fields(TrainSpec)}
    entries |= {
        f"serving.{f.name}": _listed(value)
        for f in fields(ServingSettings)
        if (value := getattr(serving, f.name)) != f.default
    }
    models = (task.params, *(offer.params for offer in task.offers))
    return Payload(entries, array=pack(*models))


def decode_task(payload: Payload, size_of: Callable[[str], tuple[Submodel | None, int]]) -> Order:
    """The task in a payload; `size_of` gives the sub-model of a name and its number of values.

    Lineages and versions are not sent to devices, so they are empty here.
    """
    entries = payload.fields
    key, run, name = (_text(entries, field) for field in ("task", "run", "submodel"))
    models = _whole(entries, "models")
    if not 1 <= models <= 1000:
        raise InvalidPayload(f"models = {models}: allowed is 1 to 1000")
    submodel, size = size_of(name)
    rows = unpack(payload.array, models, size)
    task = Task(
        id=0,
        device=_whole(entries, "device"),
        number=_whole(entries, "number"),
        lineage="",
        version=0,
        spec=_spec(entries),
        params=rows[0],
        submodel=submodel,
        offers=tuple(Offer("", i, rows[i]) for i in range(1, models)),
    )
    until = _whole(entries, "until") if "until" in entries else 0
    return Order(key, run, task, min(until, task.spec.local_epochs), _serving(entries))


def encode_resume(order: ResumeOrder) -> Payload:
    entries: dict[str, Scalar] = {"resume": order.key, "until": order.until}
    if order.newer is None:
        return Payload(entries)
    entries |= {"newer": order.number, "name": order.name, "offer": order.offer}
    return Payload(entries, array=pack(order.newer))


def decode_resume(payload: Payload, size: int) -> ResumeOrder:
    entries = payload.fields
    key, until = _text(entries, "resume"), _whole(entries, "until")
    if "newer" not in entries:
        return ResumeOrder(key, until)
    newer = unpack(payload.array, 1, size)[0]
    number, offer = _whole(entries, "newer"), _whole(entries, "offer")
    return ResumeOrder(key, until, number, _text(entries, "name"), offer, newer)


def encode_progress(progress: Progress, key: str) -> Payload:
    entries = {"task": key, "passes": progress.passes}
    return Payload({**entries, "choice": progress.number, "base": progress.name})


def decode_progress(payload: Payload, key: str) -> Progress | None:
    """The progress report of a device in mid-task; None if the payload is no such report."""
    entries = payload.fields
    if "passes" not in entries:
        return None
    if _text(entries, "task") != key:
        raise InvalidPayload("the reply is for another task")
    return Progress(_whole(entries, "passes"), _whole(entries, "choice"), _text(entries, "base"))


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _section(cls: type[Any], name: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries `name.FIELD` of a dataclass with defaults; absent ones are left out."""
    found = {f: entries[f"{name}.{f.name}"] for f in fields(cls) if f"{name}.{f.name}" in entries}
    return {f.name: _like(f.default, value, f"{name}.{f.name}") for f, value in found.items()}


def _like(default: Any, value: Any, name: str) -> Any:
    """`value` if it has the type of `default`; an integer is a float, a list of numbers a tuple."""
    if isinstance(default, tuple) and isinstance(value, list) and len(value) <= MAX_METRICS:
        return tuple(_like(0.0, each, name) for each in value)
    if type(default) is float and type(value) is int:
        value = float(value)
    if type(value) is not type(default):
        several = f"list of at most {MAX_METRICS:,} numbers"
        wanted = several if isinstance(default, tuple) else type(default).__name__
        raise InvalidPayload(f"{name} is a {type(value).__name__}, must be a {wanted}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidPayload(f"{name} must be a finite number")
    return value


def _serving(entries: Mapping[str, Any]) -> ServingSettings:
    found = _section(ServingSettings, "serving", entries)
    if not 0 <= found.get("finetune_epochs", 0) <= MAX_FINETUNE_EPOCHS:
        raise InvalidPayload(f"serving.finetune_epochs must be 0 to {MAX_FINETUNE_EPOCHS}")
    return ServingSettings(**found)


def _spec(entries: Mapping[str, Any]) -> TrainSpec:
    known = {f"spec.{f.name}" for f in fields(TrainSpec)}
    if unknown := {name for name in entries if name.startswith("spec.")} - known:
        # Without it, the device would run another training program than the server expects.
        raise InvalidPayload(f"{quoted(min(unknown))} is unknown to this version of Latecomer")
    spec = TrainSpec(**_section(TrainSpec, "spec", entries))
    if ":" in spec.optimizer:
        # A server must not choose which code a device imports.
        raise InvalidPayload("spec.optimizer: devices take no module:callable from a server")
    return spec


def encode_update(update: Update, key: str, base: str = "") -> Payload:
    """The reply to the task with this key.

    `base` is the unique id of the broadcast model that the update is from; empty: none.
    """
    entries = {
        "task": key,
        "skipped": update.delta is None,
        "noise-std": update.noise_std,
        "choice": update.choice,
        "epsilon": update.epsilon,
        "last": update.last,
    }
    if base:
        entries["base"] = base
    metrics = {"num-examples": update.num_examples, **update.metrics}
    return Payload(entries, metrics, None if update.delta is None else pack(update.delta))


def decode_update(
    payload: Payload, task: Task, key: str, newer: Mapping[int, str] | None = None
) -> Update:
    """The update in the reply to `task`; InvalidPayload if it does not match the task.

    `newer` maps the number of each broadcast sent during the task to its unique id.
    """
    entries, metrics = payload.fields, dict(payload.metrics)
    if _text(entries, "task") != key:
        raise InvalidPayload("the reply is for another task")
    check_metrics(metrics)
    for name in ("num-examples", "noise-std", "choice", "epsilon", "last", "skipped"):
        if name not in (metrics if name == "num-examples" else entries):
            raise InvalidPayload(f"{name!r} is missing")
    skipped = entries["skipped"]
    if type(skipped) is not bool:
        raise InvalidPayload("skipped must be true or false")
    choice = entries["choice"]
    if type(choice) is int and choice > len(task.offers):
        if choice not in (newer or {}):
            raise InvalidPayload(
                f"choice must be the number of a model it was sent, 0 to {len(task.offers)}"
            )
        if (newer or {})[choice] != entries.get("base"):
            raise InvalidPayload("the update is from a model that this server has not sent")
    if skipped and payload.array is not None:
        raise InvalidPayload("a reply without an update contains an array")
    delta = None if skipped else unpack(payload.array, 1, task.params.numel())[0]
    return Update(
        task.id,
        delta,
        metrics.pop("num-examples"),
        metrics,
        noise_std=entries["noise-std"],
        choice=choice,
        epsilon=entries["epsilon"],
        last=entries["last"],
    )


def check_metrics(metrics: Mapping[Any, Any]) -> None:
    """Raise InvalidPayload if there are too many metrics or a name is too long for the log."""
    if len(metrics) > MAX_METRICS or any(
        not isinstance(name, str) or len(name) > MAX_NAME for name in metrics
    ):
        raise InvalidPayload(
            f"more than {MAX_METRICS:,} metrics, or a name that is no text or too long"
        )


def encode_introduction(device: Introduction) -> Payload:
    return Payload({"name": device.name, "key": device.key, "width": device.width})


def decode_introduction(payload: Payload) -> Introduction:
    entries = payload.fields
    name, key, width = _text(entries, "name"), _text(entries, "key"), entries.get("width", 0)
    if not NAME.fullmatch(name) or not key:
        raise InvalidPayload(
            "a device needs a key, and a name of up to 100 letters, digits, . _ and -"
        )
    if type(width) not in (int, float) or not 0 < width <= 1:
        raise InvalidPayload("width must be a number above 0, at most 1")
    return Introduction(name, key, float(width))


def _text(entries: Mapping[str, Any], name: str) -> str:
    value = entries.get(name)
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise InvalidPayload(f"{name!r} is missing, or no short text")
    return value


def _whole(entries: Mapping[str, Any], name: str) -> int:
    value = entries.get(name)
    if type(value) is not int or value < 0:
        raise InvalidPayload(f"{name!r} is missing, or no whole number from 0")
    return value


def quoted(value: object) -> str:
    """`repr` of a value from a device, cut to 80 characters for the log."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
