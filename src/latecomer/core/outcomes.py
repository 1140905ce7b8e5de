"""What the server did with an event, as typed records.

Engines, summaries and back-off read the typed fields. The event log writes `kind` and `fields`;
nothing else depends on these two, so renaming a kind changes no number.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, NamedTuple


class Outcome:
    """Base class: a dataclass whose fields, except those that are None, make one log line."""

    __slots__ = ()
    kind: ClassVar[str]

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the log line."""
        names = _names(type(self))  # type: ignore[arg-type]
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        return found | found.pop("details") if "details" in found else found


@cache
def _names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))


@dataclass(slots=True)
class Dispatched(Outcome):
    """A task was given to a device; `bytes` is the size of all models sent with it."""

    kind = "dispatch"
    device: int
    task: int
    lineage: str
    version: int
    bytes: int
    offers: int | None = None


@dataclass(slots=True)
class Accepted(Outcome):
    """An update passed the checks.

    `sent` is the version of its base, `version` the head of its lineage on arrival. `weight` is
    None while a compensation that takes time is under way. `skipped` marks an answer without a
    delta, which saved `saved` bytes. `spans` are the seconds of download, training and upload,
    filled in by a simulation.
    """

    kind = "arrival"
    device: int
    task: int
    lineage: str | None = None
    sent: int | None = None
    version: int | None = None
    staleness: int | None = None
    weight: float | None = None
    bytes: int | None = None
    skipped: bool | None = None
    saved: int | None = None
    epsilon: float | None = None
    spans: tuple[float, ...] | None = None


@dataclass(slots=True)
class Compensation(Outcome):
    """A late update was compensated.

    `gamma` is the share of the estimate in the result (0: the stale update was kept), `seconds`
    the server time charged for it. `details` are further numbers for the log.
    """

    kind = "compensation"
    device: int
    task: int
    lineage: str
    sent: int
    version: int
    staleness: int
    weight: float
    gamma: float
    seconds: float
    details: Mapping[str, float]


@dataclass(slots=True)
class Refused(Outcome):
    """An update failed the checks and touched nothing; device and task are None if unknown."""

    kind = "refusal"
    device: int | None
    task: int | None
    reason: str
    sent: int | None = None
    version: int | None = None
    bytes: int | None = None
    epsilon: float | None = None
    spans: tuple[float, ...] | None = None


@dataclass(slots=True)
class Dropped(Outcome):
    """A task was lost, or the merge did not take its update."""

    kind = "drop"
    device: int
    task: int
    reason: str


@dataclass(slots=True)
class Committed(Outcome):
    """A lineage has a new head, made of `updates` contributions and `surrogates`."""

    kind = "commit"
    lineage: str
    version: int
    updates: int
    surrogates: int | None = None


@dataclass(slots=True)
class ClusterSplit(Outcome):
    """The devices left `lineage` for the new lineage `into`."""

    kind = "split"
    lineage: str
    into: str
    devices: list[int]


@dataclass(slots=True)
class ClusterMerged(Outcome):
    """The devices of `lineage` moved to `into`, and `lineage` was closed."""

    kind = "merge"
    lineage: str
    into: str
    reason: str | None = None


@dataclass(slots=True)
class BroadcastMade(Outcome):
    """The head of a lineage was sent to `devices` working devices, `bytes` in all."""

    kind = "broadcast"
    lineage: str
    version: int
    devices: int
    bytes: int


@dataclass(slots=True)
class Retired(Outcome):
    """A device gets no more tasks: its privacy budget is spent."""

    kind = "retire"
    device: int
    epsilon: float
    reason: str


@dataclass(slots=True)
class Quarantined(Outcome):
    """A device gets no task until the server has accepted `until` updates."""

    kind = "quarantine"
    device: int
    until: int
    reason: str


@dataclass(slots=True)
class RolledBack(Outcome):
    """Version `version` of the main lineage has the parameters of version `to`.

    The strategy starts anew from it; other lineages are closed, and open tasks are void.
    """

    kind = "rollback"
    version: int
    to: int
    reason: str


@dataclass(slots=True)
class CompensationEnded(Outcome):
    """Compensation fades out on a lineage, for updates less stale than `below` (None: for all).

    The errors are means over the validated estimates (None: not finite) and their stale updates.
    """

    kind = "switch"
    lineage: str
    version: int
    error_estimate: float | None
    error_stale: float
    below: float | None
    reason: str


class Note(NamedTuple):
    """One line of the event log from a part or an engine, for people; nothing reads it."""

    kind: str
    fields: Mapping[str, Any]


Logged = Outcome | Note
