"""Merge parts that tell a cluster of its new model while its devices are at work.

Li et al. 2024 (EchoPFL), section 5.2. The text and Eq. 4 state opposite rules; Eq. 4 holds: a
broadcast pays when what has changed since the last one is at least what the next merge will change.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import pvariance
from typing import Any, Literal

from torch import Tensor

from latecomer.core.strategy import BroadcastHead, Commit, Observer, ServerView
from latecomer.strategies.parts.broadcast_predictor import Predictor, averaged, state_of

Policy = Literal["never", "always", "every-n", "oracle", "predictor"]
RECORDS = 10  # K


@dataclass(slots=True)
class Record:
    """What is known of a lineage's changes since its model was last broadcast."""

    told: Tensor | None = None  # the model that was last broadcast
    changes: list[float] = field(default_factory=list)  # L1, the last K
    merges: int = 0
    gathered: float = 0.0  # when it was last predicted whether a broadcast pays
    states: list[Tensor] = field(default_factory=list)  # to learn from
    truths: list[int] = field(default_factory=list)
    predictor: Predictor | None = None


class Broadcasting(Observer):
    """Observer: after a commit, decides by `policy` whether to broadcast the lineage's new head.

    "oracle" applies Eq. 4 itself, one commit late, because only then the next change is known.
    "every-n" broadcasts after `every` commits.
    """

    broadcasts = True

    def __init__(self, policy: Policy, every: int = 5) -> None:
        self.policy, self.every = policy, every
        self._records: dict[str, Record] = {}
        self._due: list[str] = []

    def act(self, view: ServerView) -> Iterable[BroadcastHead]:
        due, self._due = self._due, []
        for lineage in due:
            if lineage in view.store:
                record = self._records.setdefault(lineage, Record())
                record.told, record.merges = view.store.head_params(lineage), 0
                yield BroadcastHead(lineage)

    def on_commit(self, commit: Commit, view: ServerView) -> None:
        before = view.store.head_params(commit.lineage)
        record = self._records.setdefault(commit.lineage, Record())
        if record.told is None:
            record.told = before
        gathered = _l1(before, record.told)  # L1(v_{t-1}, v_broadcast)
        change = _l1(commit.params, before)  # L1(v_{t-1}, v_t)
        pays = gathered >= change  # Eq. 4, for the moment before this commit
        record.merges += 1
        match self.policy:
            case "always":
                broadcast = True
            case "every-n":
                broadcast = record.merges >= self.every
            case "oracle":
                broadcast = pays and gathered > 0
            case "predictor":
                # What had gathered then counts: if it was broadcast, nothing has gathered since.
                self._learn(record, record.gathered >= change)
                record.changes = [*record.changes, change][-RECORDS:]
                broadcast = self._predict(record, _l1(commit.params, record.told))
            case "never":
                broadcast = False
        if broadcast and commit.lineage not in self._due:
            self._due.append(commit.lineage)

    def _predict(self, record: Record, gathered: float) -> bool:
        state = state_of(record.changes, gathered, RECORDS)
        record.states.append(state)
        record.gathered = gathered
        record.predictor = record.predictor or Predictor()
        return record.predictor.chance(state) > 0.5

    def _learn(self, record: Record, truth: bool) -> None:
        """What the last prediction should have been is known now; ten of them make a lesson."""
        if len(record.states) == len(record.truths) + 1:
            record.truths.append(int(truth))
        if len(record.truths) == RECORDS and record.predictor is not None:
            record.predictor.learn(record.states, record.truths)
            record.states, record.truths = [], []

    def on_fork(self, parent: str, child: str) -> None:
        """The child begins with the parent's predictor and no records; nobody need be told."""
        known = self._records.get(parent)
        if known is not None and known.predictor is not None:
            self._records[child] = Record(predictor=Predictor(known.predictor.weights()))

    def on_absorb(self, into: str, gone: str) -> None:
        """Records of both, the mean of their predictors, and a broadcast at once."""
        kept, lost = self._records.pop(into, Record()), self._records.pop(gone, Record())
        both = [p for p in (kept.predictor, lost.predictor) if p is not None]
        self._records[into] = Record(
            changes=sampled(kept.changes, lost.changes),
            predictor=averaged(both[0], both[1]) if len(both) == 2 else next(iter(both), None),
        )
        if self.policy != "never":
            self._due.append(into)

    def state(self) -> dict[str, Any]:
        return {
            "records": {name: _stored(record) for name, record in self._records.items()},
            "due": list(self._due),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._records = {name: _record(fields) for name, fields in state["records"].items()}
        self._due = list(state["due"])


def sampled(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """The largest changes of both, of each in proportion to its variance."""
    spread = [pvariance(some) if len(some) > 1 else 0.0 for some in (one, other)]
    share = spread[0] / sum(spread) if sum(spread) else 0.5
    count = min(len(one), round(share * RECORDS))
    rest = min(len(other), RECORDS - count)
    return [*sorted(one, reverse=True)[:count], *sorted(other, reverse=True)[:rest]]


def _l1(a: Tensor, b: Tensor) -> float:
    # Twice as fast as torch.dist, and more exact.
    return (a - b).abs_().sum().item()


def _stored(record: Record) -> dict[str, Any]:
    return {
        "told": record.told,
        "changes": record.changes,
        "merges": record.merges,
        "gathered": record.gathered,
        "states": record.states,
        "truths": record.truths,
        "predictor": None if record.predictor is None else record.predictor.weights(),
    }


def _record(fields: Mapping[str, Any]) -> Record:
    weights = fields["predictor"]
    return Record(**{**fields, "predictor": None if weights is None else Predictor(weights)})
