"""The paper's six takeaways checked on the study's runs: agree, disagree or inconclusive."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from latecomer.study.har.effects import Effect, effect, paired, scores_by_seed
from latecomer.study.har.plan import ASYNCHRONOUS, BASE, BUSY, FEDERATED, Plan
from latecomer.study.har.skew import Skew

AGREE, DISAGREE, INCONCLUSIVE = "agree", "disagree", "inconclusive"
MIN_SKEW = 0.05  # share of variance between devices from which features count as skewed
PAPER_STRATEGY = "async-share"
MIN_STD_RATIO = 2.0  # ratio of stds over seeds from which one test set is the less stable one


@dataclass(frozen=True)
class TakeawayCheck:
    """A claim of the paper, whether the runs agree with it, and the numbers."""

    number: int
    claim: str
    result: str
    numbers: str


@dataclass(frozen=True)
class StudyResults:
    """The scores of all runs of a study, and the feature skew of its data."""

    plan: Plan
    seeds: Sequence[int]
    table: pd.DataFrame  # one row per run, see `scores.results_table`
    equal: pd.DataFrame  # base runs at equal client updates
    rarest: str  # the class with the fewest examples
    skew: Skew  # under global scaling
    local_skew: Skew  # under local scaling
    absent: dict[str, list[str]]  # data.test -> classes absent from it for some seed


def check_takeaways(results: StudyResults) -> list[TakeawayCheck]:
    """The six checks, in the paper's order."""
    return [check(results) for check in CHECKS]


def _test_set(results: StudyResults) -> TakeawayCheck:
    claim = "held-out clients give a biased, less stable test than a fair share of every client"
    held = "held-out-clients"
    other = "fair" if results.plan.base.get("test") == held else held
    gap = effect(results.table, ASYNCHRONOUS, "test", other)
    if gap is None:
        return TakeawayCheck(1, claim, INCONCLUSIVE, "not run")
    runs = {other: ("test", other), held if other == "fair" else "fair": (BASE, "")}
    stds = {
        name: float(scores_by_seed(results.table, ASYNCHRONOUS, *run, "macro_f1").std())
        for name, run in runs.items()
    }
    ratio = stds[held] / stds["fair"] if stds["fair"] else np.nan
    absent = results.absent.get(held, [])
    mean = gap if other == held else gap.negated
    result = INCONCLUSIVE
    if absent or ratio >= MIN_STD_RATIO or mean.sign:
        result = AGREE
    elif ratio <= 1 / MIN_STD_RATIO:
        result = DISAGREE
    classes = f"; classes absent from a held-out test set: {', '.join(absent)}" if absent else ""
    return TakeawayCheck(
        1,
        claim,
        result,
        f"std of macro-F1 over seeds {stds[held]:.3f} held out, {stds['fair']:.3f} fair;"
        f" held out minus fair {mean}{classes}",
    )


def _augmentation(results: StudyResults) -> TakeawayCheck:
    return _from_effects(
        results,
        2,
        "noisy replicas of rare classes help; balancing all classes helps less",
        [("augment", "base", "none", True), ("augment", "base", "balanced", False)],
        ("macro_f1", "f1_rarest"),
    )


def _scaling(results: StudyResults) -> TakeawayCheck:
    return _from_effects(
        results,
        3,
        "global scaling is better than local scaling",
        [("scale", "global", "local", True)],
        ("macro_f1",),
    )


def _residual_skew(results: StudyResults) -> TakeawayCheck:
    claim = "after global scaling features stay skewed, most in minority classes"
    known = {name: v for name, v in results.skew.by_class.items() if not np.isnan(v)}
    if not known:
        return TakeawayCheck(4, claim, INCONCLUSIVE, "no class is on two devices")
    mean = float(np.mean(list(known.values())))
    local = [v for v in results.local_skew.by_class.values() if not np.isnan(v)]
    others = [v for name, v in known.items() if name != results.rarest]
    rare = known.get(results.rarest, float("nan"))
    more = "more" if others and rare > float(np.mean(others)) else "not more"
    return TakeawayCheck(
        4,
        claim,
        AGREE if mean >= MIN_SKEW else DISAGREE,
        f"{mean:.2f} of the variance within a class lies between devices (local scaling"
        f" {float(np.mean(local)):.2f}); the rarest class {results.rarest} has {rare:.2f}, the"
        f" others {float(np.mean(others)):.2f}: {more} in the minority",
    )


def _optimiser(results: StudyResults) -> TakeawayCheck:
    values = results.plan.values("optimizer")
    tuned = [value for value in values if value.startswith("adam ")]
    return _from_effects(
        results,
        5,
        "SGD with momentum is better than Adam, whose state restarts with every task",
        [
            ("optimizer", "sgd-m", "adam", True),
            # The paper keeps the learning rate: Adam with another one decides only if run alone.
            *(("optimizer", "sgd-m", value, "adam" not in values) for value in tuned),
        ],
        ("macro_f1",),
    )


def _busy_server(results: StudyResults) -> TakeawayCheck:
    """Decided by the paper's strategy if it was run, because the effect depends on the strategy."""
    claim = "a server that is busy per merge gives a worse model at equal updates"
    delays = results.plan.values("server_delay")
    if not delays:
        return TakeawayCheck(6, claim, INCONCLUSIVE, "not run")
    base, slowest = results.plan.strategy, max(delays, key=float)
    losses: dict[str, Effect] = {}
    for value in delays[1:]:
        change = effect(results.table, ASYNCHRONOUS, "server_delay", value)
        if change is not None:
            losses[f"{base}, {value} s"] = change.negated
    for name in results.plan.values(BUSY)[1:]:
        change = effect(results.table, ASYNCHRONOUS, BUSY, name, reference=("strategy", name))
        if change is not None:
            losses[f"{name}, {slowest} s"] = change.negated
    papers = f"{PAPER_STRATEGY}, {slowest} s"
    deciding = [losses[papers]] if papers in losses else list(losses.values())
    numbers = "; ".join(f"loss with {name}: {loss}" for name, loss in losses.items())
    return TakeawayCheck(6, claim, _combined([loss.supports_gain for loss in deciding]), numbers)


Pair = tuple[str, str, str, bool]  # factor, value that is better in the paper, other, decides


def _from_effects(
    results: StudyResults,
    number: int,
    claim: str,
    pairs: list[Pair],
    columns: tuple[str, ...],
) -> TakeawayCheck:
    """A check by the differences (better - other) of the deciding pairs in both FL paradigms."""
    signs, numbers = [], []
    for factor, better, other, decides in pairs:
        for paradigm in FEDERATED:
            for column in columns:
                diff = _difference(results, paradigm, factor, better, other, column)
                if diff is None:
                    continue
                score = "" if column == "macro_f1" else f" (F1 of {results.rarest})"
                numbers.append(f"{better} minus {other}, {paradigm}{score}: {diff}")
                if decides:
                    signs.append(diff.supports_gain)
    return TakeawayCheck(number, claim, _combined(signs), "; ".join(numbers) or "not run")


def _combined(signs: list[int]) -> str:
    """AGREE if all nonzero signs are +1, DISAGREE if all are -1, else INCONCLUSIVE."""
    clear = {sign for sign in signs if sign}
    return AGREE if clear == {1} else DISAGREE if clear == {-1} else INCONCLUSIVE


def _difference(
    results: StudyResults, paradigm: str, factor: str, better: str, other: str, column: str
) -> Effect | None:
    """better - other, paired by seed; either may be the base value. None if one was not run."""
    runs = []
    for value in (better, other):
        if results.plan.base.get(factor) == value:
            runs.append((BASE, ""))
        elif results.plan.find(paradigm, factor, value) is not None:
            runs.append((factor, value))
        else:
            return None
    first, second = (scores_by_seed(results.table, paradigm, *run, column) for run in runs)
    return paired((first - second).tolist())


CHECKS: tuple[Callable[[StudyResults], TakeawayCheck], ...] = (
    _test_set,
    _augmentation,
    _scaling,
    _residual_skew,
    _optimiser,
    _busy_server,
)
