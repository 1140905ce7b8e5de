"""On-demand broadcasts: whether a cluster's new model is sent to its devices while they train.

Li et al. 2024 (EchoPFL), section 5.2. The text and Eq. 4 state opposite rules; here Eq. 4 holds: a
broadcast pays when the change since the last broadcast is at least the change of the next commit.
Changes are L1 distances between models.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import pvariance
from typing import Literal

from torch import Tensor

from latecomer.core.codec import portable
from latecomer.core.strategy import BroadcastHead, Commit, Observer, ServerView
from latecomer.strategies.parts.broadcast_predictor import (
    Predictor,
    broadcast_features,
    mean_predictor,
)

Policy = Literal["never", "always", "every-n", "oracle", "predictor"]
MAX_CHANGES = 10  # K


@portable
@dataclass(slots=True)
class Record:
    """The changes of a lineage's model, and its predictor."""

    last_broadcast: Tensor | None = None  # the model
    changes: list[float] = field(default_factory=list)  # of the last K commits, L1
    merges: int = 0  # commits since the last broadcast
    accumulated: float = 0.0  # change since the last broadcast at the last prediction, L1
    features: list[Tensor] = field(default_factory=list)  # training data of the predictor
    labels: list[int] = field(default_factory=list)
    predictor: Predictor | None = None


class Broadcasting(Observer):
    """Observer: after a commit, decides by `policy` whether to broadcast the lineage's new head.

    "oracle" applies Eq. 4 itself, one commit late, because only then the next change is known.
    "predictor" predicts the next change, "every-n" broadcasts after `every` commits.
    """

    broadcasts = True
    kept = ("_records", "_due")

    def __init__(self, policy: Policy, every: int = 5) -> None:
        self.policy, self.every = policy, every
        self._records: dict[str, Record] = {}
        self._due: list[str] = []

    def act(self, view: ServerView) -> Iterable[BroadcastHead]:
        due, self._due = self._due, []
        for lineage in due:
            if lineage in view.store:
                record = self._records.setdefault(lineage, Record())
                record.last_broadcast, record.merges = view.store.head_params(lineage), 0
                yield BroadcastHead(lineage)

    def on_commit(self, commit: Commit, view: ServerView) -> None:
        before = view.store.head_params(commit.lineage)
        record = self._records.setdefault(commit.lineage, Record())
        if record.last_broadcast is None:
            record.last_broadcast = before
        accumulated = l1_distance(before, record.last_broadcast)  # L1(v_{t-1}, v_broadcast)
        change = l1_distance(commit.params, before)  # L1(v_{t-1}, v_t)
        pays = accumulated >= change  # Eq. 4, for the moment before this commit
        record.merges += 1
        match self.policy:
            case "always":
                broadcast = True
            case "every-n":
                broadcast = record.merges >= self.every
            case "oracle":
                broadcast = pays and accumulated > 0
            case "predictor":
                # The change at the prediction decides: a broadcast since then would have reset it.
                self._train(record, record.accumulated >= change)
                record.changes = [*record.changes, change][-MAX_CHANGES:]
                broadcast = self._predict(record, l1_distance(commit.params, record.last_broadcast))
            case "never":
                broadcast = False
        if broadcast and commit.lineage not in self._due:
            self._due.append(commit.lineage)

    def _predict(self, record: Record, accumulated: float) -> bool:
        features = broadcast_features(record.changes, accumulated, MAX_CHANGES)
        record.features.append(features)
        record.accumulated = accumulated
        record.predictor = record.predictor or Predictor()
        return record.predictor.probability(features) > 0.5

    def _train(self, record: Record, label: bool) -> None:
        """Label the last prediction; K labelled predictions make a training step."""
        if len(record.features) == len(record.labels) + 1:
            record.labels.append(int(label))
        if len(record.labels) == MAX_CHANGES and record.predictor is not None:
            record.predictor.train(record.features, record.labels)
            record.features, record.labels = [], []

    def on_fork(self, parent: str, child: str) -> None:
        """The child starts with the parent's predictor, without changes and without a broadcast."""
        known = self._records.get(parent)
        if known is not None and known.predictor is not None:
            self._records[child] = Record(predictor=Predictor(known.predictor.weights))

    def on_absorb(self, into: str, gone: str) -> None:
        """The changes of both, the mean of their predictors, and a broadcast."""
        kept, lost = self._records.pop(into, Record()), self._records.pop(gone, Record())
        both = [p for p in (kept.predictor, lost.predictor) if p is not None]
        self._records[into] = Record(
            changes=merged_changes(kept.changes, lost.changes),
            predictor=mean_predictor(*both) if len(both) == 2 else next(iter(both), None),
        )
        if self.policy != "never":
            self._due.append(into)


def merged_changes(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """The largest K changes of both, from each in proportion to its variance. Section 5.2.2."""
    variances = [pvariance(some) if len(some) > 1 else 0.0 for some in (one, other)]
    share = variances[0] / sum(variances) if sum(variances) else 0.5
    count = min(len(one), round(share * MAX_CHANGES))
    rest = min(len(other), MAX_CHANGES - count)
    return [*sorted(one, reverse=True)[:count], *sorted(other, reverse=True)[:rest]]


def l1_distance(a: Tensor, b: Tensor) -> float:
    # Twice as fast as torch.dist, and more accurate.
    return (a - b).abs_().sum().item()
