"""Runs that are killed in the middle."""

from latecomer.study.runner import Silent


class Killed(BaseException):
    """Stands for a kill: no checkpoint is written."""


class DieAfter(Silent):
    def __init__(self, updates: int) -> None:
        self.updates = updates

    def advanced(self, share: float, updates: int, virtual_seconds: float) -> None:
        if updates >= self.updates:
            raise Killed
