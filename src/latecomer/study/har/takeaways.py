"""The paper's six takeaways checked on the study's runs: agree, disagree or inconclusive."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from latecomer.study.har.effects import Effect, paired
from latecomer.study.har.plan import ASYNCHRONOUS, BUSY, FEDERATED, Plan
from latecomer.study.har.skew import Skew

AGREE, DISAGREE, INCONCLUSIVE = "agree", "disagree", "inconclusive"
MIN_SKEW = 0.05  # share of variance between devices from which features count as skewed
PAPER_STRATEGY = "async-share"
Change = tuple[str, str]  # factor and value
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

    def scores(
        self, paradigm: str, factor: str, value: str, column: str = "macro_f1"
    ) -> "pd.Series[float]":
        """`column` of the runs of a paradigm with `factor` = `value` by seed; empty if not run."""
        table, (factor, value) = self.table, self.plan.key(factor, value)
        chosen = (table["paradigm"] == paradigm) & (table["factor"] == factor)
        return table[chosen & (table["value"].astype(str) == value)].set_index("seed")[column]

    def difference(
        self, paradigm: str, first: Change, second: Change, column: str = "macro_f1"
    ) -> Effect | None:
        """First minus second, paired by seed; None if one was not run."""
        one, other = (self.scores(paradigm, *change, column) for change in (first, second))
        return None if one.empty or other.empty else paired(one - other)


def check_takeaways(results: StudyResults) -> list[TakeawayCheck]:
    """The six checks, in the paper's order."""
    return [check(results) for check in CHECKS]


def _test_set(results: StudyResults) -> TakeawayCheck:
    claim = "held-out clients give a biased, less stable test than a fair share of every client"
    held = "held-out-clients"
    gap = results.difference(ASYNCHRONOUS, ("test", held), ("test", "fair"))
    if gap is None:
        return TakeawayCheck(1, claim, INCONCLUSIVE, "not run")
    held_std, fair_std = (
        float(results.scores(ASYNCHRONOUS, "test", name).std()) for name in (held, "fair")
    )
    ratio = held_std / fair_std if fair_std else np.nan
    absent = results.absent.get(held, [])
    result = INCONCLUSIVE
    if absent or ratio >= MIN_STD_RATIO or gap.sign:
        result = AGREE
    elif ratio <= 1 / MIN_STD_RATIO:
        result = DISAGREE
    classes = f"; classes absent from a held-out test set: {', '.join(absent)}" if absent else ""
    return TakeawayCheck(
        1,
        claim,
        result,
        f"std of macro-F1 over seeds {held_std:.3f} held out, {fair_std:.3f} fair;"
        f" held out minus fair {gap}{classes}",
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
    )


def _busy_server(results: StudyResults) -> TakeawayCheck:
    """Decided by the paper's strategy if it was run, because the effect depends on the strategy."""
    claim = "a server that is busy per merge gives a worse model at equal updates"
    delays = results.plan.values("server_delay")
    if not delays:
        return TakeawayCheck(6, claim, INCONCLUSIVE, "not run")
    base, slowest = results.plan.strategy, max(delays, key=float)
    pairs = {
        f"{base}, {value} s": (("server_delay", delays[0]), ("server_delay", value))
        for value in delays[1:]
    } | {
        f"{name}, {slowest} s": (("strategy", name), (BUSY, name))
        for name in results.plan.values(BUSY)[1:]
    }
    found = {name: results.difference(ASYNCHRONOUS, *pair) for name, pair in pairs.items()}
    losses = {name: loss for name, loss in found.items() if loss is not None}
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
    columns: tuple[str, ...] = ("macro_f1",),
) -> TakeawayCheck:
    """A check by the differences (better - other) of the deciding pairs in both FL paradigms."""
    signs, numbers = [], []
    for factor, better, other, decides in pairs:
        for paradigm in FEDERATED:
            for column in columns:
                diff = results.difference(paradigm, (factor, better), (factor, other), column)
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


CHECKS: tuple[Callable[[StudyResults], TakeawayCheck], ...] = (
    _test_set,
    lambda results: _from_effects(
        results,
        2,
        "noisy replicas of rare classes help; balancing all classes helps less",
        [("augment", "base", "none", True), ("augment", "base", "balanced", False)],
        ("macro_f1", "f1_rarest"),
    ),
    lambda results: _from_effects(
        results,
        3,
        "global scaling is better than local scaling",
        [("scale", "global", "local", True)],
    ),
    _residual_skew,
    _optimiser,
    _busy_server,
)
