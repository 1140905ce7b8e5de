"""How a server makes a model fit for use, and what it knows of how devices make it their own."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from latecomer.core.messages import Contribution, Note, ServingSettings
from latecomer.core.strategy import Commit, Drop, Merge, ServerView
from latecomer.device.flat import FlatModel
from latecomer.strategies.latecomer.cached_aggregation import FORGET_AFTER_PASSES, WEIGHT_CAP
from latecomer.strategies.latecomer.calibration import Judged, offsets, unevenness
from latecomer.strategies.latecomer.model_averaging import Averages
from latecomer.strategies.parts.clustering import Clustering
from latecomer.strategies.parts.labels import output_bias
from latecomer.strategies.parts.submodel_levels import Around
from latecomer.strategies.parts.switch_off import switch_note

# How spread the errors of devices are, where 1 is chance: when they are alike, and when not.
ALIKE, DIFFERENT = 1.5, 2.5
# How unevenly a class lies on devices, from 0 to 1: when all have it, and when few have.
EVEN, UNEVEN = 0.3, 0.4
FEWEST = 20  # arrivals between two looks
MOST, SOME = 1 / 2, 1 / 3  # of the devices: when more add noise, and when fewer do


class Personalisation(Around[Merge]):
    """Merge: as the inner part does, remembering what models need to be used.

    A device adds up to `keep` of its own last change, as it serves it, and reckons with its class
    mix as far as `mix`. In simulation the server speaks for it, and keeps the last change of each,
    also of those who are gone. From their judgements it knows what classes a model expects, and
    whether devices differ at all: until they are seen to, nothing is kept, because what one has
    learnt alone is worse than what all have. The outputs of the model for classes that few hold are
    moved by `calibrate` of what makes it say them as often as they are. With `average` a model to
    which devices have added noise for their privacy is used as the average of its way; it is
    trained as it is.
    """

    def __init__(
        self,
        inner: Merge,
        keep: float,
        mix: float,
        branches: Clustering | None,
        calibrate: float = 0.0,
        average: bool = False,
    ) -> None:
        super().__init__(inner)
        self.mix = mix
        self._keep, self._branches, self._calibrate = keep, branches, calibrate
        self._changes: dict[int, tuple[int, Tensor]] = {}  # device -> task's number, change
        self._examples: dict[int, int] = {}
        self._since, self._apart, self._arrivals = 0, False, 0
        self._uneven: Tensor | None = None  # of classes that few hold, the others have 0
        # device -> the lineage and version it last told of, and at which arrival
        self._told: dict[int, tuple[str, int, int]] = {}
        self._uses: dict[str, tuple[int, ServingSettings]] = {}  # by lineage: as of a commit
        self._average, self._averages = average, Averages()
        self._noisy: set[int] = set()  # devices that add noise for their privacy
        self._averaging = False
        self._notes: list[str] = []

    @property
    def keep(self) -> float:
        return self._keep if self._apart else 0.0

    def add(self, contribution: Contribution, view: ServerView) -> Commit | Drop | None:
        task, update = contribution.task, contribution.update
        self._since += 1
        self._arrivals += 1
        self._examples[task.device] = update.num_examples
        if "share_0" in update.metrics:
            self._told[task.device] = (task.lineage, task.version, self._arrivals)
        known, _ = self._changes.get(task.device, (-1, None))
        # A repaired update may come after a newer one.
        private = update.noise_std or update.epsilon
        if self._keep and update.delta is not None and not private and task.number > known:
            self._changes[task.device] = (task.number, update.delta)
        if self._average:
            self._look_at_noise(contribution, view)
        made = self.inner.add(contribution, view)
        if isinstance(made, Commit):
            self._follow(made, view)
        return made

    def settle(self, view: ServerView) -> Iterable[Commit]:
        for made in self.inner.settle(view):
            self._follow(made, view)
            yield made

    def on_fork(self, parent: str, child: str) -> None:
        super().on_fork(parent, child)
        self._averages.copy(parent, child)

    def on_absorb(self, into: str, gone: str) -> None:
        super().on_absorb(into, gone)
        self._averages.forget(gone)

    def _look_at_noise(self, contribution: Contribution, view: ServerView) -> None:
        """Whether models are averaged: not because one of many says that it adds noise."""
        update, lineage = contribution.update, contribution.lineage
        self._noisy.discard(contribution.task.device)
        if update.noise_std or update.epsilon:
            self._noisy.add(contribution.task.device)
        share = len(self._noisy) / len(self._examples)
        if self._averaging != (share > (SOME if self._averaging else MOST)):
            self._averaging = not self._averaging
            what = "add" if self._averaging else "no longer add"
            which = "average of the last models is" if self._averaging else "last model is"
            self._notes.append(f"most devices {what} noise for their privacy: the {which} in use")
        if not self._averaging:
            self._averages.forget(*self._averages)
        elif lineage not in self._averages:
            self._averages.begin(lineage, view.store.head_params(lineage))

    def _follow(self, made: Commit, view: ServerView) -> None:
        if made.lineage in self._averages:
            here = sum(view.home(device) == made.lineage for device in self._examples)
            turns = made.contributions / max(1, here)
            self._averages.add(made.lineage, made.params, turns)

    def change(self, device: int) -> Tensor | None:
        """What its training last changed, as far as it is known."""
        return self._changes[device][1] if device in self._changes else None

    def expected(self, devices: Sequence[int], classes: int) -> Tensor | None:
        """The shares of the classes that the model of these devices expects."""
        if self._branches is None:
            return None
        if self._uneven is None:
            return self._branches.expected(devices, classes)
        told = self._branches.told(devices, classes).values()
        if not told:
            return self._branches.expected(devices, classes)
        soft, share, _ = (torch.stack(values).mean(0) for values in zip(*told, strict=True))
        found = torch.lerp(soft, share, self._calibrate * self._uneven)
        total = found.sum()
        return found / total if total > 0 else soft

    def calibrated(self, lineage: str, view: ServerView) -> Tensor:
        """The newest model, or the average of its way, moved in its output bias if it has one."""
        return self._moved(
            self._averages.get(lineage, view.store.head_params(lineage)), lineage, view
        )

    def as_sent(self, lineage: str, view: ServerView) -> Tensor:
        """The newest model, moved likewise: devices are sent the one that is trained."""
        return self._moved(view.store.head_params(lineage), lineage, view)

    def _moved(self, head: Tensor, lineage: str, view: ServerView) -> Tensor:
        offset = self._offset(lineage, view)
        if offset is None:
            return head
        moved = head.clone()
        moved[_bias(view)] += offset.to(head.dtype)
        return moved

    def use(self, lineage: str, view: ServerView) -> ServingSettings:
        """What devices are told of it, who are sent the model as it is trained."""
        known = self._uses.get(lineage)
        # Every task asks for it, and it takes a look at all devices.
        if known is None or known[0] != view.store.commits:
            known = self._uses[lineage] = (view.store.commits, self._use(lineage, view))
        return known[1]

    def _use(self, lineage: str, view: ServerView) -> ServingSettings:
        network, offset = _network(view), self._offset(lineage, view)
        classes = network.num_classes if network else 0
        here = [device for device in self._examples if view.home(device) == lineage]
        expected = self.expected(here, classes)
        return ServingSettings(
            float(self.keep),
            float(self.mix),
            () if expected is None else tuple(expected.tolist()),
            () if offset is None else tuple(offset.tolist()),
        )

    def _offset(self, lineage: str, view: ServerView) -> Tensor | None:
        """What is added to the outputs of its model; None if they stay."""
        if self._uneven is None or _bias(view) is None:
            return None
        judged = self._judged(view, lineage)
        return offsets(judged, self._calibrate * self._uneven) if len(judged) > 1 else None

    def _judged(self, view: ServerView, lineage: str | None = None) -> list[Judged]:
        """What devices tell of the model of this lineage, or of any.

        Not what they told of the first model, of which nothing is left, nor what those told who
        have been gone for long.
        """
        network, long_ago = (
            _network(view),
            self._arrivals - FORGET_AFTER_PASSES * len(self._examples),
        )
        if network is None or self._branches is None:
            return []
        devices = [
            device
            for device, (of, version, at) in self._told.items()
            if version > 0
            and lineage in (None, of)
            and (at >= long_ago or device in view.working or device in view.idle)
        ]
        told = self._branches.told(devices, network.num_classes)
        return [Judged(self._examples[device], *of) for device, of in told.items()]

    def tell(self, view: ServerView) -> Iterable[Note]:
        yield from super().tell(view)
        yield from (switch_note(why, view.store.commits) for why in self._notes)
        self._notes.clear()
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
        judged = self._judged(view) if self._calibrate and _bias(view) is not None else []
        if len(judged) < 2:
            return None
        found = unevenness(judged)
        before = torch.zeros_like(found) if self._uneven is None else self._uneven
        few = found >= torch.where(before > 0, EVEN, UNEVEN)
        self._uneven = torch.where(few, found, 0.0) if few.any() else None
        if few.equal(before > 0):
            return None
        if self._uneven is None:
            return "all devices have all classes again: outputs stay"
        which = ", ".join(str(j) for j in few.nonzero().flatten().tolist())
        how = f"unevenness up to {found.max().item():.2f} of 1"
        return f"few devices hold classes {which}: outputs are calibrated for them; {how}"

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "changes": dict(self._changes),
            "examples": dict(self._examples),
            "since": self._since,
            "apart": self._apart,
            "uneven": self._uneven,
            "arrivals": self._arrivals,
            "told": dict(self._told),
            "averages": self._averages.state(),
            "noisy": sorted(self._noisy),
            "averaging": self._averaging,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._changes, self._examples = dict(state["changes"]), dict(state["examples"])
        self._since, self._apart = state["since"], state["apart"]
        self._uneven, self._arrivals = state["uneven"], state["arrivals"]
        self._told, self._noisy = dict(state["told"]), set(state["noisy"])
        self._averaging = state["averaging"]
        self._averages.restore(state["averages"])
        self._uses = {}


def _bias(view: ServerView) -> slice | None:
    """Where the outputs can be moved."""
    network = _network(view)
    return output_bias(network) if network else None


def _network(view: ServerView) -> FlatModel | None:
    return cast(FlatModel | None, view.network(None))


def dispersion(errors: Sequence[tuple[float, float]]) -> float:
    """The spread of shares of errors in n examples each, where 1 is chance; 0 if nobody errs.

    Nobody counts for more than ten times the usual number of examples.
    """
    most = WEIGHT_CAP * median(n for _, n in errors)
    errors = [(e, min(n, most)) for e, n in errors]
    total = sum(n for _, n in errors)
    mean = sum(e * n for e, n in errors) / total
    by_chance = mean * (1 - mean) * (len(errors) - 1)
    return sum(n * (e - mean) ** 2 for e, n in errors) / by_chance if by_chance > 0 else 0.0
