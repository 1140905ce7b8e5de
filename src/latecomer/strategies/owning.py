"""What a server knows of how devices make models their own (`latecomer.device.personal`)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from latecomer.core.messages import Contribution, Note
from latecomer.core.strategy import Commit, Drop, Merge, ServerView
from latecomer.strategies.branches import Branches
from latecomer.strategies.fitting import Around

# How spread the errors of devices are, where 1 is chance: when they are alike, and when not.
ALIKE, DIFFERENT = 1.5, 2.5
FEWEST = 20  # arrivals between two looks


class Owning(Around[Merge]):
    """Merge: as the inner part does, remembering with what devices make models their own.

    A device adds `keep` of its own last change, and reckons with its class mix as far as `mix`. In
    simulation the server speaks for it, so it keeps the last change of each, also of those who are
    gone. From their judgements, where there are any, it knows what classes a model expects, and
    whether devices differ at all: if not, what one has learnt alone is worse than what all have,
    and nothing is kept.
    """

    def __init__(self, inner: Merge, keep: float, mix: float, branches: Branches | None) -> None:
        super().__init__(inner)
        self.mix = mix
        self._keep, self._branches = keep, branches
        self._changes: dict[int, Tensor] = {}
        self._examples: dict[int, int] = {}
        self._since, self._apart = 0, True

    @property
    def keep(self) -> float:
        return self._keep if self._apart else 0.0

    def add(self, contribution: Contribution, view: ServerView) -> Commit | Drop | None:
        device, update = contribution.task.device, contribution.update
        self._since += 1
        self._examples[device] = update.num_examples
        if self._keep and update.delta is not None and not update.noise_std:
            self._changes[device] = update.delta
        return self.inner.add(contribution, view)

    def settle(self, view: ServerView) -> Iterable[Commit]:
        return self.inner.settle(view)

    def change(self, device: int) -> Tensor | None:
        """What its training last changed, as far as it is known."""
        return self._changes.get(device)

    def expected(self, devices: Sequence[int]) -> Tensor | None:
        """The shares of the classes that the model of these devices expects."""
        return self._branches.expected(devices) if self._branches else None

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
            what = "differ: they keep a part of their own" if self._apart else "are alike"
            reason = f"devices {what}; their errors are {spread:.1f} times as spread as by chance"
            fields = {"lineage": "", "version": view.store.commits, "reason": reason}
            yield Note("switch", fields)

    def state(self) -> dict[str, Any]:
        own = {"changes": dict(self._changes), "examples": dict(self._examples)}
        return {**super().state(), **own, "since": self._since, "apart": self._apart}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._changes, self._examples = dict(state["changes"]), dict(state["examples"])
        self._since, self._apart = state["since"], state["apart"]


def dispersion(errors: Sequence[tuple[float, int]]) -> float:
    """The spread of shares of errors in n examples each, where 1 is chance; 0 if nobody errs."""
    total = sum(n for _, n in errors)
    mean = sum(e * n for e, n in errors) / total
    by_chance = mean * (1 - mean) * (len(errors) - 1)
    return sum(n * (e - mean) ** 2 for e, n in errors) / by_chance if by_chance > 0 else 0.0
