"""Progress of a deployed run, read from the files that its server writes."""

import csv
from contextlib import suppress
from pathlib import Path

from latecomer.deploy.flower_log import FlowerProgress
from latecomer.errors import BadInput
from latecomer.study.metric_names import label_of, metric_columns, number_text
from latecomer.study.view.history import Follower, History


class RunProgress:
    """Counts and first metric of a run, as of the last `read` of its event log and metrics."""

    def __init__(self, folder: Path) -> None:
        self._log, self._metrics = Follower(folder / "events.jsonl"), folder / "metrics.csv"
        self.metric = ""
        self.score: float | None = None
        self.flower = FlowerProgress()  # for apps whose strategy is one of Flower's

    @property
    def history(self) -> History:
        return self._log.history

    @property
    def has_log(self) -> bool:
        """Whether Latecomer's server has begun to write its event log."""
        return self._log.path.is_file()

    @property
    def updates(self) -> int:
        return sum(self.history.updates.values()) if self.has_log else self.flower.updates

    def read(self) -> None:
        """Read what was written since the last call; a log that is not there yet is empty."""
        with suppress(BadInput):
            self._log.catch_up()
        with suppress(OSError, ValueError, LookupError):
            rows = list(csv.DictReader(self._metrics.read_text(encoding="utf-8").splitlines()))
            # Metrics of devices come after the row, so the last rows may lack them.
            self.metric = _first_share(metric_columns(rows[0]))
            self.score = float([row[self.metric] for row in rows if row[self.metric]][-1])

    def line(self) -> str:
        if not self.has_log:
            return self.flower.line()
        shown = [f"{self.history.commits} versions", f"{self.updates} updates"]
        if self.score is not None:
            shown.append(f"{label_of(self.metric)} {number_text(self.metric, self.score)}")
        if self.history.failures:
            shown.append(f"{self.history.failures} lost")
        if self.history.quarantined:
            shown.append(f"{len(self.history.quarantined)} in quarantine")
        if self.history.rollbacks:
            shown.append(f"rolled back {self.history.rollbacks} times")
        return ", ".join(shown)


def _first_share(names: list[str]) -> str:
    """The first accuracy among the metrics, else the first metric."""
    return next((name for name in names if "acc" in name), names[0])
