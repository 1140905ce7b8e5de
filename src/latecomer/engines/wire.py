"""Tasks and answers as they travel: flat fields, metrics and at most one array. No pickle.

A payload knows nothing of Flower. What comes off the wire is hostile: sizes and types are compared
with what was asked for before a single value is read, and `InvalidPayload` says what was wrong. Values
(finite, in bounds) are left to `core.checks`, which sees every update.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from io import BytesIO
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from latecomer.core.messages import Offer, ServingSettings, Task, TrainSpec, Update
from latecomer.core.submodel import Submodel, name_of

FLOAT32 = "float32"
MOST_HEADER = 256  # bytes that .npy may put before the values
MOST_METRICS = 10_000
LONGEST_NAME = 200  # of a metric, a device, a sub-model or a key

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # of a device

Scalar = bool | int | float | str


class InvalidPayload(ValueError):
    """What a payload carries cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Packed:
    """An array on its way: what it claims to be, and its bytes as .npy."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(slots=True)
class Payload:
    """What one message carries. From a device, nothing in it has been checked.

    Our own devices are sent one `array`, because many small ones are slow.
    """

    fields: Mapping[str, Any]
    metrics: Mapping[str, Any] = field(default_factory=dict)
    array: Packed | None = None
    named: Mapping[str, Packed] = field(default_factory=dict)  # for apps that speak in state_dicts


@dataclass(frozen=True, slots=True)
class Order:
    """A task as a device gets it, with the names of it and of its run."""

    key: str
    run: str
    task: Task
    until: int = 0  # passes over the data, after which it is to say so and wait; 0: all
    use: ServingSettings | None = None


@dataclass(frozen=True, slots=True)
class GoOn:
    """What a device that waits in mid-task is told: train up to `until` passes.

    Before that it takes up `newer`, if there is one: the model that has this number within the
    task, and this name for ever. `fits` is the offer of the same lineage, 0 for none.
    """

    key: str
    until: int
    number: int = 0
    name: str = ""
    fits: int = 0
    newer: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """A device has done so many passes, from the newer model of this number and name, if any."""

    passes: int
    number: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Introduction:
    """A device says who it is: `key` is its own secret, by which it is known again.

    `width` is what it can carry of the model.
    """

    name: str
    key: str
    width: float = 1.0


def pack(*rows: Tensor) -> Packed:
    """Vectors of equal length as the rows of one array."""
    return pack_one(torch.stack([row.detach() for row in rows]))


def pack_one(tensor: Tensor) -> Packed:
    """A tensor as it is."""
    values = tensor.detach().contiguous().numpy()
    file = BytesIO()
    np.save(file, values, allow_pickle=False)
    return Packed(str(values.dtype), values.shape, file.getvalue())


def unpack(packed: Packed | None, rows: int, size: int) -> Tensor:
    """The float32 matrix of that shape; nothing is read or allocated for any other."""
    if packed is None:
        raise InvalidPayload("there is no array in it")
    return unpack_one(packed, (rows, size))


def unpack_one(packed: Packed, shape: tuple[int, ...]) -> Tensor:
    """The float32 tensor of that shape; nothing is read or allocated for any other."""
    if packed.dtype != FLOAT32:
        raise InvalidPayload(f"the array is of {quoted(packed.dtype)}, must be {FLOAT32}")
    if tuple(packed.shape) != shape:
        raise InvalidPayload(f"the array has shape {quoted(packed.shape)}, must be {shape}")
    expected = 4 * prod(shape)
    if not isinstance(packed.data, bytes) or len(packed.data) > expected + MOST_HEADER:
        raise InvalidPayload(f"the array has more bytes than {_product(shape)} values take")
    if len(packed.data) < expected:
        raise InvalidPayload("the array's bytes are not what it claims to be")
    values = packed.data[len(packed.data) - expected :]
    # The header is read by itself: numpy would allocate whatever shape it claims.
    fortran = _header(packed.data[: len(packed.data) - expected], shape)
    if fortran is None:
        raise InvalidPayload("the array's bytes are not what it claims to be")
    found = np.frombuffer(values, dtype="<f4").reshape(shape, order="F" if fortran else "C")
    return torch.from_numpy(np.array(found, order="C"))


def _header(head: bytes, shape: tuple[int, ...]) -> bool | None:
    """Whether columns come before rows; None if it is not the header of such an array."""
    file = BytesIO(head)
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            return None
        found, fortran, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=256)
    except Exception:  # numpy parses a header as Python text: it fails in many ways
        return None
    if file.tell() != len(head) or dtype.byteorder == ">" or dtype.name != FLOAT32:
        return None
    return bool(fortran) if found == shape else None


def _product(shape: tuple[int, ...]) -> str:
    return " x ".join(str(size) for size in shape) or "1"


def encode_task(
    task: Task, key: str, run: str = "", until: int = 0, use: ServingSettings | None = None
) -> Payload:
    """A task with all the models that the device may start from, as rows of one array.

    `key` names the task for ever; numbers may be given anew after a restart of the server. `run`
    names what the task is part of, over all restarts. `until` is for a task that is done in parts.
    `use` is how the device makes the model its own.
    """
    told: dict[str, Any] = {
        "task": key,
        "run": run,
        "device": task.device,
        "number": task.number,
        "models": 1 + len(task.offers),
        "submodel": name_of(task.submodel),
    }
    if until:
        told["until"] = until
    told |= {f"spec.{f.name}": getattr(task.spec, f.name) for f in fields(TrainSpec)}
    if use is not None:
        told |= {
            f"use.{name}": _listed(value) for name, value in asdict(use).items() if value != ()
        }
    models = (task.params, *(offer.params for offer in task.offers))
    return Payload(told, array=pack(*models))


def decode_task(payload: Payload, size_of: Callable[[str], tuple[Submodel | None, int]]) -> Order:
    """What the server asks for; `size_of` gives a named sub-model and its number of values.

    Where a model comes from is the server's business: lineages and versions stay at home.
    """
    told = payload.fields
    key, run, name = (_text(told, field) for field in ("task", "run", "submodel"))
    models = _whole(told, "models")
    if not 1 <= models <= 1000:
        raise InvalidPayload(f"models = {models}: allowed is 1 to 1000")
    submodel, size = size_of(name)
    rows = unpack(payload.array, models, size)
    task = Task(
        id=0,
        device=_whole(told, "device"),
        number=_whole(told, "number"),
        lineage="",
        version=0,
        spec=_spec(told),
        params=rows[0],
        submodel=submodel,
        offers=tuple(Offer("", i, rows[i]) for i in range(1, models)),
    )
    until = _whole(told, "until") if "until" in told else 0
    return Order(key, run, task, min(until, task.spec.local_epochs), _use(told))


def encode_go_on(order: GoOn) -> Payload:
    told: dict[str, Scalar] = {"go-on": order.key, "until": order.until}
    if order.newer is None:
        return Payload(told)
    told |= {"newer": order.number, "name": order.name, "fits": order.fits}
    return Payload(told, array=pack(order.newer))


def decode_go_on(payload: Payload, size: int) -> GoOn:
    told = payload.fields
    key, until = _text(told, "go-on"), _whole(told, "until")
    if "newer" not in told:
        return GoOn(key, until)
    newer = unpack(payload.array, 1, size)[0]
    number, fits = _whole(told, "newer"), _whole(told, "fits")
    return GoOn(key, until, number, _text(told, "name"), fits, newer)


def encode_progress(progress: Progress, key: str) -> Payload:
    told = {"task": key, "passes": progress.passes}
    return Payload({**told, "choice": progress.number, "base": progress.name})


def decode_progress(payload: Payload, key: str) -> Progress | None:
    """What a device in mid-task says; None if this is not of that kind."""
    told = payload.fields
    if "passes" not in told:
        return None
    if _text(told, "task") != key:
        raise InvalidPayload("it answers another task")
    return Progress(_whole(told, "passes"), _whole(told, "choice"), _text(told, "base"))


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _use(told: Mapping[str, Any]) -> ServingSettings | None:
    """How the device makes the model its own; None if the server does not say."""
    found = {
        name: told[f"use.{name}"] for name in asdict(ServingSettings()) if f"use.{name}" in told
    }
    for name, value in found.items():
        several = isinstance(getattr(ServingSettings(), name), tuple)
        values = value if several else [value]
        listed = isinstance(values, list) and len(values) <= MOST_METRICS
        if not listed or not all(type(v) in (int, float) and math.isfinite(v) for v in values):
            raise InvalidPayload(
                f"use.{name} must be {'a list of numbers' if several else 'a number'}"
            )
        found[name] = tuple(float(v) for v in values) if several else float(value)
    return ServingSettings(**found) if found else None


def _spec(told: Mapping[str, Any]) -> TrainSpec:
    found: dict[str, Any] = {}
    for each in fields(TrainSpec):
        default, value = each.default, told.get(f"spec.{each.name}")
        if value is None:
            continue  # an older server does not know it
        if type(default) is float and type(value) is int:
            value = float(value)
        if type(value) is not type(default):
            raise InvalidPayload(f"spec.{each.name} is a {type(value).__name__}")
        found[each.name] = value
    unknown = {name for name in told if name.startswith("spec.")} - {
        f"spec.{f.name}" for f in fields(TrainSpec)
    }
    if unknown:
        # To train without it would be to train something else.
        raise InvalidPayload(f"{quoted(min(unknown))} is unknown here: the server is newer")
    return TrainSpec(**found)


def encode_update(update: Update, key: str, base: str = "") -> Payload:
    """The answer to the task of that key. Its own number stays behind: the key says it all.

    `base` is the name of the newer model that the device has gone on from, if it has.
    """
    told = {
        "task": key,
        "silent": update.delta is None,
        "noise-std": update.noise_std,
        "choice": update.choice,
        "epsilon": update.epsilon,
        "last": update.last,
    }
    if base:
        told["base"] = base
    metrics = {"num-examples": update.num_examples, **update.metrics}
    return Payload(told, metrics, None if update.delta is None else pack(update.delta))


def decode_update(
    payload: Payload, task: Task, key: str, newer: Mapping[int, str] | None = None
) -> Update:
    """What a device answers to `task`; Refused if it is no answer to it, or of the wrong form.

    `newer` names the broadcasts that it was sent while it worked, by their numbers.
    """
    told, metrics = payload.fields, dict(payload.metrics)
    if _text(told, "task") != key:
        raise InvalidPayload("it answers another task")
    check_metrics(metrics)
    for name in ("num-examples", "noise-std", "choice", "epsilon", "last", "silent"):
        if name not in (metrics if name == "num-examples" else told):
            raise InvalidPayload(f"{name!r} is missing")
    silent = told["silent"]
    if type(silent) is not bool:
        raise InvalidPayload("silent must be true or false")
    choice = told["choice"]
    if type(choice) is int and choice > len(task.offers):
        if choice not in (newer or {}):
            most = len(task.offers)
            raise InvalidPayload(f"choice must be the number of a model it was sent, 0 to {most}")
        if (newer or {})[choice] != told.get("base"):
            raise InvalidPayload(
                "it went on from a model that this server does not remember sending"
            )
    if silent and payload.array is not None:
        raise InvalidPayload("it says that it is silent, and brings an array")
    delta = None if silent else unpack(payload.array, 1, task.params.numel())[0]
    return Update(
        task.id,
        delta,
        metrics.pop("num-examples"),
        metrics,
        noise_std=told["noise-std"],
        choice=choice,
        epsilon=told["epsilon"],
        last=told["last"],
    )


def check_metrics(metrics: Mapping[Any, Any]) -> None:
    """Refused if there are too many, or names that no log can bear."""
    if len(metrics) > MOST_METRICS or any(
        not isinstance(name, str) or len(name) > LONGEST_NAME for name in metrics
    ):
        raise InvalidPayload(f"more than {MOST_METRICS:,} metrics, or one with an impossible name")


def encode_introduction(who: Introduction) -> Payload:
    return Payload({"name": who.name, "key": who.key, "width": who.width})


def decode_introduction(payload: Payload) -> Introduction:
    told = payload.fields
    name, key, width = _text(told, "name"), _text(told, "key"), told.get("width", 0)
    if not NAME.fullmatch(name) or not key:
        raise InvalidPayload(
            "a device needs a key, and a name of up to 100 letters, digits, . _ and -"
        )
    if type(width) not in (int, float) or not 0 < width <= 1:
        raise InvalidPayload("width must be a number above 0, at most 1")
    return Introduction(name, key, float(width))


def _text(told: Mapping[str, Any], name: str) -> str:
    value = told.get(name)
    if not isinstance(value, str) or len(value) > LONGEST_NAME:
        raise InvalidPayload(f"{name!r} is missing, or no short text")
    return value


def _whole(told: Mapping[str, Any], name: str) -> int:
    value = told.get(name)
    if type(value) is not int or value < 0:
        raise InvalidPayload(f"{name!r} is missing, or no whole number from 0")
    return value


def quoted(value: object) -> str:
    """As much of what a stranger says as a log line can bear."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
