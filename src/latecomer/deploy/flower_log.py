"""Progress of an app with one of Flower's own strategies, read from the log of its run."""

import re
from dataclasses import dataclass

ROUND = re.compile(r"\[ROUND (\d+)/(\d+)\]")
RESULTS = re.compile(r"aggregate_train: Received (\d+) results and (\d+) failures")
METRICS = re.compile(r"MetricRecord: (\{.*?\})")
NUMBER = re.compile(r"'([^']+)': (-?[\d.]+(?:e[+-]?\d+)?)")


@dataclass(frozen=True)
class FlowerProgress:
    """Rounds, models and updates of a synchronous run, and the last metric in its log."""

    round: int = 0
    rounds: int = 0
    versions: int = 0
    updates: int = 0
    lost: int = 0
    metric: str = ""
    value: float = 0.0

    @classmethod
    def of(cls, text: str) -> "FlowerProgress":
        """Read the lines that Flower's strategies write; an accuracy goes before other metrics."""
        rounds, results = ROUND.findall(text), RESULTS.findall(text)
        found = [pair for record in METRICS.findall(text) for pair in NUMBER.findall(record)]
        shown = [pair for pair in found if "acc" in pair[0]] or found or [("", "0")]
        current, total = rounds[-1] if rounds else (0, 0)
        return cls(
            int(current),
            int(total),
            sum(int(received) > 0 for received, _ in results),
            sum(int(received) for received, _ in results),
            sum(int(lost) for _, lost in results),
            shown[-1][0],
            float(shown[-1][1]),
        )

    def line(self) -> str:
        parts = [f"round {self.round} of {self.rounds}"] if self.rounds else []
        parts += [f"{self.versions} versions", f"{self.updates} updates"]
        parts += [f"{self.metric} {self.value:.3f}"] if self.metric else []
        return ", ".join(parts + ([f"{self.lost} lost"] if self.lost else []))
