"""What a server knows of how devices make models their own (`latecomer.device.personal`)."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from torch import Tensor

from latecomer.core.messages import Contribution, Note
from latecomer.core.strategy import Commit, Drop, Merge, ServerView
from latecomer.strategies.branches import Branches
from latecomer.strategies.fitting import Around
from latecomer.strategies.roll_call import HEAVIEST
from latecomer.strategies.switching import switch_note

# How spread the errors of devices are, where 1 is chance: when they are alike, and when not.
ALIKE, DIFFERENT = 1.5, 2.5
FEWEST = 20  # arrivals between two looks


class Owning(Around[Merge]):
    """Merge: as the inner part does, remembering with what devices make models their own.

    A device adds `keep` of its own last change, and reckons with its class mix as far as `mix`. In
    simulation the server speaks for it, so it keeps the last change of each, also of those who are
    gone. From their judgements it knows what classes a model expects, and whether devices differ at
    all: until they are seen to, nothing is kept, because what one has learnt alone is worse than
    what all have.
    """

    def __init__(self, inner: Merge, keep: float, mix: float, branches: Branches | None) -> None:
        super().__init__(inner)
        self.mix = mix
        self._keep, self._branches = keep, branches
        self._changes: dict[int, tuple[int, Tensor]] = {}  # device -> task's number, change
        self._examples: dict[int, int] = {}
        self._since, self._apart = 0, False

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
        return self._branches.expected(devices, classes) if self._branches else None

    def tell(self, view: ServerView) -> Iterable[Note]:
        yield from super().tell(view)
        if self._since < max(FEWEST, len(self._examples)) or not self._keep:
            return
        self._since = 0
        errors = self._branches.errors(self._examples) if self._branches else {}
        if len(errors) < 2:
            return
        spread = dispersion([(error, self._examples[d]) for d, error in errors.items()])
        if self._apart != (spread >= (ALIKE if self._apart else DIFFERENT)):
            self._apart = not self._apart
            what = "differ: they keep a part" if self._apart else "are alike: they keep nothing"
            reason = (
                f"devices {what} of their own; errors {spread:.1f} times as spread as by chance"
            )
            yield switch_note(reason, view.store.commits)

    def state(self) -> dict[str, Any]:
        own = {"changes": dict(self._changes), "examples": dict(self._examples)}
        return {**super().state(), **own, "since": self._since, "apart": self._apart}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._changes, self._examples = dict(state["changes"]), dict(state["examples"])
        self._since, self._apart = state["since"], state["apart"]


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
