"""The paper's six takeaways, held against this data: agree, disagree or cannot tell."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from latecomer.study.har.effects import Effect, by_seed, effect, paired
from latecomer.study.har.plan import ASYNCHRONOUS, BASE, BUSY, FEDERATED, Plan
from latecomer.study.har.skew import Skew

AGREE, DISAGREE, CANNOT_TELL = "agree", "disagree", "cannot tell"
LASTING_SKEW = 0.05  # share of variance between devices from which a class looks different
PAPERS_STRATEGY = "async-share"
MUCH_WIDER = 2.0  # ratio of spreads from which one test set is less stable than the other


@dataclass(frozen=True)
class Verdict:
    """A takeaway of the paper, and what these data say to it."""

    number: int
    topic: str
    claim: str
    verdict: str
    numbers: str


@dataclass(frozen=True)
class Evidence:
    """What a study has found."""

    plan: Plan
    table: pd.DataFrame
    rarest: str
    skew: Skew  # under global scaling
    local_skew: Skew
    missing: dict[str, list[str]]  # test set -> classes absent from it, for some seed


def verdicts(found: Evidence) -> list[Verdict]:
    return [judge(found) for judge in JUDGES]


def _test_set(found: Evidence) -> Verdict:
    claim = "held-out clients give a biased, less stable test than a fair share of every client"
    held = "held-out-clients"
    other = "fair" if found.plan.base.get("test") == held else held
    gap = effect(found.table, ASYNCHRONOUS, "test", other)
    if gap is None:
        return Verdict(1, "test set", claim, CANNOT_TELL, "not run")
    runs = {other: ("test", other), held if other == "fair" else "fair": (BASE, "")}
    stds = {
        name: float(by_seed(found.table, ASYNCHRONOUS, *run, "macro_f1").std())
        for name, run in runs.items()
    }
    ratio = stds[held] / stds["fair"] if stds["fair"] else np.nan
    absent = found.missing.get(held, [])
    mean = gap if other == held else gap.reversed
    verdict = CANNOT_TELL
    if absent or ratio >= MUCH_WIDER or mean.sign:
        verdict = AGREE
    elif ratio <= 1 / MUCH_WIDER:
        verdict = DISAGREE
    classes = f"; classes absent from a held-out test set: {', '.join(absent)}" if absent else ""
    return Verdict(
        1,
        "test set",
        claim,
        verdict,
        f"spread of macro-F1 over seeds {stds[held]:.3f} held out, {stds['fair']:.3f} fair;"
        f" held out minus fair {mean}{classes}",
    )


def _augmentation(found: Evidence) -> Verdict:
    return _from_effects(
        found,
        2,
        "augmentation",
        "noisy replicas of rare classes help; balancing all classes helps less",
        [("augment", "base", "none", 1), ("augment", "base", "balanced", 0)],
        ("macro_f1", "f1_rarest"),
    )


def _scaling(found: Evidence) -> Verdict:
    return _from_effects(
        found,
        3,
        "global scaling",
        "global scaling is better than local scaling",
        [("scale", "global", "local", 1)],
        ("macro_f1",),
    )


def _residual(found: Evidence) -> Verdict:
    claim = "after global scaling features stay skewed, most in minority classes"
    known = {name: v for name, v in found.skew.by_class.items() if not np.isnan(v)}
    if not known:
        return Verdict(4, "residual skew", claim, CANNOT_TELL, "no class is on two devices")
    mean = float(np.mean(list(known.values())))
    local = [v for v in found.local_skew.by_class.values() if not np.isnan(v)]
    others = [v for name, v in known.items() if name != found.rarest]
    rare = known.get(found.rarest, float("nan"))
    more = "more" if others and rare > float(np.mean(others)) else "not more"
    return Verdict(
        4,
        "residual skew",
        claim,
        AGREE if mean >= LASTING_SKEW else DISAGREE,
        f"{mean:.2f} of the variance within a class lies between devices (local scaling"
        f" {float(np.mean(local)):.2f}); the rarest class {found.rarest} has {rare:.2f}, the"
        f" others {float(np.mean(others)):.2f}: {more} in the minority",
    )


def _optimiser(found: Evidence) -> Verdict:
    values = found.plan.values("optimizer")
    own = [value for value in values if value.startswith("adam ")]
    return _from_effects(
        found,
        5,
        "optimiser",
        "SGD with momentum is better than Adam, whose state restarts with every task",
        [
            ("optimizer", "sgd-m", "adam", 1),
            # The paper keeps the learning rate; Adam with its own decides only where that is all.
            *(("optimizer", "sgd-m", value, int("adam" not in values)) for value in own),
        ],
        ("macro_f1",),
    )


def _busy_server(found: Evidence) -> Verdict:
    """Decided by the paper's own strategy where it was run, as it hangs on the strategy."""
    claim = "a server that is busy per merge gives a worse model at equal updates"
    delays = found.plan.values("server_delay")
    if not delays:
        return Verdict(6, "busy server", claim, CANNOT_TELL, "not run")
    base, slowest = found.plan.strategy, max(delays, key=float)
    losses: dict[str, Effect] = {}
    for value in delays[1:]:
        change = effect(found.table, ASYNCHRONOUS, "server_delay", value)
        if change is not None:
            losses[f"{base}, {value} s"] = change.reversed
    for name in found.plan.values(BUSY)[1:]:
        change = effect(found.table, ASYNCHRONOUS, BUSY, name, against=("strategy", name))
        if change is not None:
            losses[f"{name}, {slowest} s"] = change.reversed
    papers = f"{PAPERS_STRATEGY}, {slowest} s"
    deciding = [losses[papers]] if papers in losses else list(losses.values())
    told = "; ".join(f"loss with {name}: {loss}" for name, loss in losses.items())
    return Verdict(6, "busy server", claim, _together([loss.backs for loss in deciding]), told)


Pair = tuple[str, str, str, int]  # factor, better by the paper, worse, whether it decides


def _from_effects(
    found: Evidence,
    number: int,
    topic: str,
    claim: str,
    pairs: list[Pair],
    columns: tuple[str, ...],
    paradigms: tuple[str, ...] = FEDERATED,
) -> Verdict:
    """By the sign of the deciding differences: all that are clear must point the same way."""
    signs, told = [], []
    for factor, better, worse, decides in pairs:
        for paradigm in paradigms:
            for column in columns:
                diff = _difference(found, paradigm, factor, better, worse, column)
                if diff is None:
                    continue
                what = "" if column == "macro_f1" else f" (F1 of {found.rarest})"
                told.append(f"{better} minus {worse}, {paradigm}{what}: {diff}")
                if decides:
                    signs.append(diff.backs)
    return Verdict(number, topic, claim, _together(signs), "; ".join(told) or "not run")


def _together(signs: list[int]) -> str:
    """All that say something must say the same."""
    clear = {sign for sign in signs if sign}
    return AGREE if clear == {1} else DISAGREE if clear == {-1} else CANNOT_TELL


def _difference(
    found: Evidence, paradigm: str, factor: str, better: str, worse: str, column: str
) -> Effect | None:
    """better - worse, paired by seed, whichever of them (or neither) is the base."""
    values = []
    for value in (better, worse):
        if found.plan.base.get(factor) == value:
            values.append((BASE, ""))
        elif found.plan.find(paradigm, factor, value) is not None:
            values.append((factor, value))
        else:
            return None
    one, other = (by_seed(found.table, paradigm, *value, column) for value in values)
    return paired((one - other).tolist())


JUDGES: tuple[Callable[[Evidence], Verdict], ...] = (
    _test_set,
    _augmentation,
    _scaling,
    _residual,
    _optimiser,
    _busy_server,
)
