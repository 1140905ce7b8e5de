"""Limits that a device sets on the tasks of a server; a server cannot change them."""

from collections.abc import Mapping
from dataclasses import dataclass

from latecomer.core.messages import TrainSpec
from latecomer.errors import BadInput

KEYS = {  # of the node-config -> field
    "max-epochs": "epochs",
    "max-steps": "steps",
    "max-bytes": "bytes",
    "max-tasks-per-day": "tasks_per_day",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest task that a device accepts, and how many; 0: no limit.

    epochs: local epochs of a task.
    steps: mini-batches of a task.
    bytes: size of the models in a task's message.
    tasks_per_day: tasks started on one UTC day; repetitions of a message are not counted.
    """

    epochs: int = 1_000
    steps: int = 1_000_000
    bytes: int = 0
    tasks_per_day: int = 0

    @classmethod
    def of(cls, config: Mapping[str, object]) -> "Limits":
        """The limits in a node-config; keys that are not in it have the defaults."""
        found: dict[str, int] = {}
        for key, field in KEYS.items():
            text = str(config.get(key, "0"))
            if not text.isdecimal():
                raise BadInput(f"node-config {key} = {text}: must be a whole number; 0 = no limit")
            if key in config:
                found[field] = int(text)
        return cls(**found)

    def reason_to_refuse(self, spec: TrainSpec, examples: int, size: int, today: int) -> str:
        """Why a task of this spec and size (bytes) is refused after `today` tasks; empty if not."""
        values = (
            ("max-epochs", "local epochs", spec.local_epochs, self.epochs),
            ("max-steps", "steps", spec.local_epochs * spec.epoch_steps(examples), self.steps),
            ("max-bytes", "bytes", size, self.bytes),
            ("max-tasks-per-day", "tasks today", today + 1, self.tasks_per_day),
        )
        for key, what, value, limit in values:
            if limit and value > limit:
                return f"{value:,} {what}: this device takes at most {limit:,} ({key})"
        return ""
