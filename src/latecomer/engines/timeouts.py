"""How long a deployed server waits."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long the loop waits for what, in seconds."""

    poll: float = 1.0  # at most, for replies
    look: float = 2.0  # between looks at which nodes there are
    hello: float = 300.0  # for a node to say who it is
    overdue: float = 3600.0  # for a reply, before others may take the device's place
    probe: float = 300.0  # for a reply, before the node is asked whether it has lost the task
    grace: float = 10.0  # after a node's word, for a reply that it has sent before
    away: float = 300.0  # for a device that was lost with a task, before that is closed
    give_up: float = 7 * 86400.0  # for a reply, before its task is closed
    back_off: float = 5.0  # after a device's first failure, doubled with each further one
    longest_back_off: float = 3600.0

    def after(self, failures: int) -> float:
        return float(min(self.back_off * 2.0 ** min(failures - 1, 60), self.longest_back_off))
