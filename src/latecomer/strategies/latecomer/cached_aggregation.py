"""Gu et al., Fast Federated Learning in the Presence of Arbitrary Device Unavailability, 2021.

MIFA: the server keeps the last delta of every device, and each step is the mean over all of them,
so that those who are seldom heard count as much as those who are heard all the time. Here a step
follows every few arrivals instead of every round, and what is known to be outdated is renewed.

Wang et al., Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached Update
Calibration, 2024 (CA2FL), after SAGA (Defazio et al. 2014): by how much those who have just spoken
have changed their minds is what all others are expected to have changed theirs by.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from latecomer.core.codec import portable
from latecomer.core.messages import Contribution, Update
from latecomer.core.strategy import Commit, ServerView
from latecomer.core.submodel import Submodel, covered, name_of
from latecomer.strategies.parts.merging import Surrogates
from latecomer.strategies.parts.quota import quota

FORGET_AFTER_PASSES = (
    3  # turns of its lineage after which the word of a device that is gone no longer counts
)
WEIGHT_CAP = 10.0  # times the usual weight: no device may claim more


@portable
@dataclass(frozen=True, slots=True, eq=False)
class CachedUpdate:
    """The last that a device has said, or a stand-in for it."""

    delta: Tensor
    submodel: Submodel | None
    weight: float
    heard: int  # at which commit
    size: float  # root mean square, which does not hang on how much of the model is covered
    signal: float = 1.0  # the share of its square that is not noise
    begin: float | None = None  # how far along it the model lay when it was said, if known


def cached_update_of(
    contribution: Contribution, heard: int, base: Tensor | None = None
) -> CachedUpdate:
    delta, submodel = contribution.delta, contribution.task.submodel
    size = size_of(delta, delta.numel())
    signal = signal_share(size, contribution.update)
    begin = None if base is None else along(delta, size, base)
    return CachedUpdate(delta, submodel, contribution.weight, heard, size, signal, begin)


def signal_share(size: float, update: Update) -> float:
    """How much of the square of a word of this size its device has not added for privacy."""
    noise = update.noise_std
    if not noise:
        return 0.0 if update.epsilon else 1.0  # how much noise there is after Adam, nobody knows
    return 1.0 - (noise / size) ** 2 if noise < size else 0.0


def voice(signal: float, times: float) -> float:
    """How loud a new word is, if all words weigh so many times what the new ones do.

    What of it is noise is heard once instead of in every commit of a turn, in the same sum.
    """
    return signal + (1.0 - signal) * times


def size_of(delta: Tensor, coordinates: int) -> float:
    """The root of the mean square of so many coordinates; the others are 0."""
    norm: float = delta.norm().item()
    return norm / math.sqrt(max(1, coordinates))


class CachedAggregation:
    """Merge: when `share` of the members have arrived there is a commit, in which all have a word.

    The step is the weighted mean of the last words of all members, times `step` for a whole turn
    of them. A word of more than `clip` times the usual size is shortened to that (0: never). What
    was heard longer ago than a turn counts less, (turns)^-`fade`. With `lead` the change of those
    who have just arrived counts for everybody: not at all at 0 (MIFA), in full at 1 (CA2FL).
    With `reach` steps are so short that in a turn the mean moves the model by no more than so many
    times the usual word (0: as far as it likes): where all say the same, and mean it to the end,
    twice the mean of old words is too far. What those who lead add is shortened by as much.
    With `place` a word means a place (1) rather than a direction (0): what of its way the model has
    gone since it was said is not said again. That damps what late ones set swinging.
    Noise that devices add for privacy is not repeated: of a word what is more than noise counts in
    every commit, the rest when it is new, then for all of these. As far as words are noise nobody
    leads, and steps are not shortened: nothing is said twice.
    `surrogates` renew the words of devices that have been silent for a turn. A share of 0 commits
    at every arrival.
    """

    def __init__(
        self,
        share: float,
        step: float,
        clip: float,
        fade: float = 0.0,
        lead: float = 0.0,
        reach: float = 0.0,
        place: float = 0.0,
        surrogates: Surrogates | None = None,
    ) -> None:
        self.share, self.step, self.clip, self.fade = share, step, clip, fade
        self.lead, self.reach, self.place = lead, reach, place
        self.surrogates = surrogates
        self._words: dict[str, dict[int, CachedUpdate]] = {}
        self._arrived: dict[str, list[int]] = {}
        self._before: dict[
            str, dict[int, CachedUpdate]
        ] = {}  # of those who have arrived: their word then

    def add(self, contribution: Contribution, view: ServerView) -> Commit | None:
        lineage, device = contribution.lineage, contribution.task.device
        arrived = self._arrived.setdefault(lineage, [])
        before = self._before.setdefault(lineage, {})
        words = self._words.setdefault(lineage, {})
        if self.lead and device in words and device not in arrived:
            before[device] = words[device]
        for known in self._words.values():
            known.pop(device, None)  # it is a member of one lineage at a time
        words[device] = cached_update_of(
            contribution, view.store.commits, self._base(contribution, view)
        )
        arrived.append(device)
        members = self._members(lineage, view)
        if len(arrived) < quota(self.share, members):
            return None
        del self._arrived[lineage], self._before[lineage]
        turn = members / len(arrived) * len(view.store.lineages)  # in commits
        self._forget(words, turn, view)
        others = self._renew(lineage, turn, view)
        spoke, head = {*arrived}, view.store.head_params(lineage)
        step = min(1.0, self.step * len(spoke) / members)
        signal = median(word.signal for word in words.values())
        faded = [self._faded(word, turn, view) for word in words.values()]
        voices = self._voices(words, faded, spoke)
        params = called(head, faded, step, self.clip, self.place, voices)
        commits = members / len(spoke)
        within = self._within_reach(params - head, faded, commits, signal) if self.reach else 1.0
        changes = [
            (was, words[d]) for d, was in before.items() if d in words and same(was, words[d])
        ]
        if changes:
            params = led(params, changes, faded, self.lead * signal, step, self.clip)
        if within < 1:
            params = torch.lerp(head, params, within)
        return Commit(lineage, params, len(arrived), others)

    def settle(self, view: ServerView) -> Iterable[Commit]:
        return ()

    def _voices(
        self, words: Mapping[int, CachedUpdate], faded: Sequence[CachedUpdate], spoke: Set[int]
    ) -> list[float] | None:
        if all(word.signal == 1.0 for word in faded):
            return None
        heaviest, _ = bounds(faded, self.clip)
        weights = [min(word.weight, heaviest) for word in faded]
        new = [weight for device, weight in zip(words, weights, strict=True) if device in spoke]
        times = math.fsum(weights) / math.fsum(new)
        return [
            voice(word.signal, times) if device in spoke else word.signal
            for device, word in words.items()
        ]

    def _within_reach(
        self, move: Tensor, words: Sequence[CachedUpdate], commits: float, signal: float
    ) -> float:
        """The share of a move that, made in all commits of a turn, stays within reach."""
        reach, far = self.reach * usual_size(words), size_of(move, widest(words)) * commits
        within = reach / far if 0 < reach < far else 1.0
        return within if signal == 1.0 else 1.0 - signal * (1.0 - within)

    def _base(self, contribution: Contribution, view: ServerView) -> Tensor | None:
        """What it was said of; of another lineage's model there is no way to this one's."""
        if not self.place:
            return None
        here = view.store.resolve(contribution.task.lineage) == contribution.lineage
        return contribution.base if here else None

    def _faded(self, word: CachedUpdate, turn: float, view: ServerView) -> CachedUpdate:
        turns = (view.store.commits - word.heard) / turn
        if not self.fade or turns <= 1.0:
            return word
        return replace(word, weight=word.weight * turns**-self.fade)

    def _members(self, lineage: str, view: ServerView) -> int:
        """How many may speak: those who are there, and those who have."""
        words = self._words[lineage]
        present = [d for devices in (view.idle, view.working) for d in devices if d not in words]
        if len(view.store.lineages) > 1:
            present = [device for device in present if view.home(device) == lineage]
        return len(present) + len(words)

    def _forget(self, words: dict[int, CachedUpdate], turn: float, view: ServerView) -> None:
        for device, word in list(words.items()):
            gone = device not in view.working and device not in view.idle
            if gone and view.store.commits - word.heard > FORGET_AFTER_PASSES * turn:
                del words[device]

    def _renew(self, lineage: str, turn: float, view: ServerView) -> int:
        if self.surrogates is None:
            return 0
        words, now = self._words[lineage], view.store.commits
        fresh = [device for device, word in words.items() if now - word.heard <= turn]
        renewed = self.surrogates(lineage, fresh, view)
        for other in renewed:
            known = words.get(other.task.device)
            heard = now if known is None else known.heard
            words[other.task.device] = cached_update_of(other, heard, self._base(other, view))
        return len(renewed)

    def on_fork(self, parent: str, child: str) -> None:
        """What was said stays with the parent."""

    def on_absorb(self, into: str, gone: str) -> None:
        """What was said of another model does not count; those who said it are heard anew."""
        for kept in (self._words, self._arrived, self._before):
            kept.pop(gone, None)

    def state(self) -> dict[str, Any]:
        return {
            "words": {name: dict(of) for name, of in self._words.items()},
            "arrived": {name: list(of) for name, of in self._arrived.items()},
            "before": {name: dict(of) for name, of in self._before.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._words = {name: dict(of) for name, of in state["words"].items()}
        self._arrived = {name: list(of) for name, of in state["arrived"].items()}
        self._before = {name: dict(of) for name, of in state["before"].items()}


def usual_size(words: Iterable[CachedUpdate]) -> float:
    return median(word.size for word in words)


def widest(words: Iterable[CachedUpdate]) -> int:
    """How many coordinates are covered: narrower networks are corners of wider ones."""
    return max(word.delta.numel() for word in words)


def same(one: CachedUpdate, other: CachedUpdate) -> bool:
    """Whether both are of the same part of the model."""
    return name_of(one.submodel) == name_of(other.submodel)


def called(
    head: Tensor,
    words: Sequence[CachedUpdate],
    step: float,
    clip: float,
    place: float = 0.0,
    voices: Sequence[float] | None = None,
) -> Tensor:
    """head + step * weighted mean of the words, per coordinate over those who trained it.

    `voices` make words louder or softer than their weight in the mean. Of each word `place` of what
    the model has gone of its way is left out.
    """
    heaviest, longest = bounds(words, clip)
    weights = [min(word.weight, heaviest) for word in words]
    voices = [1.0] * len(words) if voices is None else voices
    factors = [
        loud * weight * shortened(word, longest) * left_of(word, head, place)
        for word, weight, loud in zip(words, weights, voices, strict=True)
    ]
    total = torch.zeros_like(head)
    if all(word.submodel is None for word in words):
        for word, factor in zip(words, factors, strict=True):
            total.add_(word.delta, alpha=factor)
        return torch.add(head, total, alpha=step / math.fsum(weights))
    share = torch.zeros_like(head)
    for word, weight, factor in zip(words, weights, factors, strict=True):
        index = covered(word.submodel)
        total[index] += factor * word.delta
        share[index] += weight
    return torch.where(share > 0, head + step * total / share, head)


def left_of(word: CachedUpdate, head: Tensor, place: float) -> float:
    """The share of it that is still to be said: not `place` of what the model has gone of it."""
    if not place or word.begin is None:
        return 1.0
    gone = along(word.delta, word.size, head[covered(word.submodel)]) - word.begin
    return 1.0 - place * min(1.0, max(0.0, gone))


def along(delta: Tensor, size: float, params: Tensor) -> float:
    """How far `params` lie in the direction of a word of this size, in lengths of it."""
    square = size * size * delta.numel()
    # A dot product would hang on where the tensors lie in memory, and with it a resumed run.
    product: float = (params * delta).sum(dtype=torch.float64).item()
    return product / square if square > 0 else 0.0


def led(
    params: Tensor,
    changes: Sequence[tuple[CachedUpdate, CachedUpdate]],
    words: Sequence[CachedUpdate],
    lead: float,
    step: float,
    clip: float,
) -> Tensor:
    """params + step * what is missing to `lead` of the mean change of those who have spoken.

    Their share of all words is in the mean of these already: per coordinate, over those who
    trained it. Words are compared as they were said, so that it is a change, too, if there is less
    left to say: what is measured on some damps more than what is reckoned for all.
    """
    heaviest, longest = bounds(words, clip)
    total = torch.zeros_like(params)
    # Where all train the whole model, every coordinate has the same share.
    alike = all(word.submodel is None for word in words)
    share, whole = (params.new_zeros(1) if alike else torch.zeros_like(params) for _ in range(2))
    for was, now in changes:
        weight, index = min(now.weight, heaviest), covered(now.submodel)
        change = shortened(now, longest) * now.delta - shortened(was, longest) * was.delta
        total[index] += weight * change
        share[index] += weight
    for word in words:
        whole[covered(word.submodel)] += min(word.weight, heaviest)
    ahead = (lead - share / whole).clamp_min(0.0)
    return torch.where(share > 0, params + step * ahead * total / share, params)


def bounds(words: Sequence[CachedUpdate], clip: float) -> tuple[float, float]:
    """The most that one may weigh, and how long a word may be (0: any length)."""
    return WEIGHT_CAP * median(word.weight for word in words), clip * usual_size(words)


def shortened(word: CachedUpdate, longest: float) -> float:
    """The factor that makes the word no longer than that; 0 is no bound."""
    return longest / word.size if longest and word.size > longest else 1.0
