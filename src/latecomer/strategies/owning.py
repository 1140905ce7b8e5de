"""How a server makes a model fit for use, and what it knows of how devices make it their own."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from latecomer.core.messages import Contribution, Note, Use
from latecomer.core.strategy import Commit, Drop, Merge, ServerView
from latecomer.device.flat import FlatModel
from latecomer.strategies.branches import Branches
from latecomer.strategies.calibration import Judged, offsets, skew
from latecomer.strategies.fitting import Around
from latecomer.strategies.labels import output_bias
from latecomer.strategies.roll_call import HEAVIEST
from latecomer.strategies.switching import switch_note

# How spread the errors of devices are, where 1 is chance: when they are alike, and when not.
ALIKE, DIFFERENT = 1.5, 2.5
# How skewed the classes of devices are, from 0 to 1: when they are even, and when not.
EVEN, SKEWED = 0.1, 0.2
FEWEST = 20  # arrivals between two looks


class Owning(Around[Merge]):
    """Merge: as the inner part does, remembering what models need to be used.

    A device adds `keep` of its own last change, and reckons with its class mix as far as `mix`. In
    simulation the server speaks for it, so it keeps the last change of each, also of those who are
    gone. From their judgements it knows what classes a model expects, and whether devices differ at
    all: until they are seen to, nothing is kept, because what one has learnt alone is worse than
    what all have. Where devices hold few classes each, the outputs of the model are moved by
    `calibrate` of what makes it say all of them as often as they are.
    """

    def __init__(
        self,
        inner: Merge,
        keep: float,
        mix: float,
        branches: Branches | None,
        calibrate: float = 0.0,
    ) -> None:
        super().__init__(inner)
        self.mix = mix
        self._keep, self._branches, self._calibrate = keep, branches, calibrate
        self._changes: dict[int, tuple[int, Tensor]] = {}  # device -> task's number, change
        self._examples: dict[int, int] = {}
        self._since, self._apart, self._skewed = 0, False, False

    @property
    def keep(self) -> float:
        return self._keep if self._apart else 0.0

    def add(self, contribution: Contribution, view: ServerView) -> Commit | Drop | None:
        task, update = contribution.task, contribution.update
        self._since += 1
        self._examples[task.device] = update.num_examples
        known, _ = self._changes.get(task.device, (-1, None))
        # A repaired update may come after a newer one.
        if self._keep and update.delta is not None and not update.noise_std and task.number > known:
            self._changes[task.device] = (task.number, update.delta)
        return self.inner.add(contribution, view)

    def settle(self, view: ServerView) -> Iterable[Commit]:
        return self.inner.settle(view)

    def change(self, device: int) -> Tensor | None:
        """What its training last changed, as far as it is known."""
        return self._changes[device][1] if device in self._changes else None

    def expected(self, devices: Sequence[int], classes: int) -> Tensor | None:
        """The shares of the classes that the model of these devices expects."""
        if self._branches is None:
            return None
        told = self._branches.told(devices, classes) if self._skewed else {}
        if told:
            return torch.stack([share for _, share, _ in told.values()]).mean(0)
        return self._branches.expected(devices, classes)

    def calibrated(self, lineage: str, view: ServerView) -> Tensor:
        """The newest model, moved in its output bias; as it is if it has none."""
        head, offset, network = (
            view.store.head_params(lineage),
            self._offset(lineage, view),
            _network(view),
        )
        place = output_bias(network) if network else None
        if offset is None or place is None:
            return head
        moved = head.clone()
        moved[place] += offset.to(head.dtype)
        return moved

    def use(self, lineage: str, view: ServerView) -> Use:
        """What devices are told of it, who are sent the model as it is trained."""
        network, offset = _network(view), self._offset(lineage, view)
        classes = network.num_classes if network else 0
        expected = self.expected(self._here(lineage, view), classes)
        return Use(
            self.keep,
            self.mix,
            () if expected is None else tuple(expected.tolist()),
            () if offset is None else tuple(offset.tolist()),
        )

    def _here(self, lineage: str, view: ServerView) -> list[int]:
        return [device for device in self._examples if view.home(device) == lineage]

    def _offset(self, lineage: str, view: ServerView) -> Tensor | None:
        """What is added to the outputs of its model; None if they stay."""
        network = _network(view)
        if network is None or not self._skewed:
            return None
        judged = self._judged(self._here(lineage, view), network.num_classes)
        return self._calibrate * offsets(judged) if len(judged) > 1 else None

    def _judged(self, devices: Iterable[int], classes: int) -> list[Judged]:
        told = self._branches.told(devices, classes) if self._branches else {}
        return [Judged(self._examples[device], *of) for device, of in told.items()]

    def tell(self, view: ServerView) -> Iterable[Note]:
        yield from super().tell(view)
        if self._since < max(FEWEST, len(self._examples)):
            return
        self._since = 0
        reasons = [self._look_at_errors(), self._look_at_classes(view)]
        yield from (switch_note(why, view.store.commits) for why in reasons if why)

    def _look_at_errors(self) -> str | None:
        """Whether devices keep something of their own from now on, if that is new."""
        errors = self._branches.errors(self._examples) if self._branches and self._keep else {}
        if len(errors) < 2:
            return None
        spread = dispersion([(error, self._examples[d]) for d, error in errors.items()])
        if self._apart == (spread >= (ALIKE if self._apart else DIFFERENT)):
            return None
        self._apart = not self._apart
        what = "differ: they keep a part" if self._apart else "are alike: they keep nothing"
        return f"devices {what} of their own; errors {spread:.1f} times as spread as by chance"

    def _look_at_classes(self, view: ServerView) -> str | None:
        """Whether the model is calibrated from now on, if that is new."""
        network = _network(view)
        if not self._calibrate or network is None:
            return None
        judged = self._judged(self._examples, network.num_classes)
        if len(judged) < 2:
            return None
        found = skew(judged)
        if self._skewed == (found >= (EVEN if self._skewed else SKEWED)):
            return None
        self._skewed = not self._skewed
        what = "few classes: outputs are calibrated" if self._skewed else "all: outputs stay"
        return f"devices hold {what}; their classes are skewed by {found:.2f}, 1 is one on each"

    def state(self) -> dict[str, Any]:
        own = {"changes": dict(self._changes), "examples": dict(self._examples)}
        return {
            **super().state(),
            **own,
            "since": self._since,
            "apart": self._apart,
            "skewed": self._skewed,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._changes, self._examples = dict(state["changes"]), dict(state["examples"])
        self._since, self._apart = state["since"], state["apart"]
        self._skewed = state["skewed"]


def _network(view: ServerView) -> FlatModel | None:
    return cast(FlatModel | None, view.network(None))


def dispersion(errors: Sequence[tuple[float, float]]) -> float:
    """The spread of shares of errors in n examples each, where 1 is chance; 0 if nobody errs.

    Nobody counts for more than ten times the usual number of examples.
    """
    most = HEAVIEST * median(n for _, n in errors)
    errors = [(e, min(n, most)) for e, n in errors]
    total = sum(n for _, n in errors)
    mean = sum(e * n for e, n in errors) / total
    by_chance = mean * (1 - mean) * (len(errors) - 1)
    return sum(n * (e - mean) ** 2 for e, n in errors) / by_chance if by_chance > 0 else 0.0
