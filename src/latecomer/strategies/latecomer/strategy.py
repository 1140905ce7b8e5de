"""The strategy to begin with: what five papers found, each part where it pays.

Late updates are repaired, and known devices are spoken for while they are away (FedDC); all have a
word in every step, and those who have just spoken lead (MIFA, CA2FL); devices whose data contradict
each other's get models of their own, and who is far behind is told of the news while it works
(EchoPFL); who carries a part of the model counts there (PrivaAsyncFed), its `[submodels]` and
`[privacy]` are the config's; a model says what few devices hold as often as it is; each device
makes it its own by its class mix and its last training; nobody can shout.
"""

from dataclasses import replace

from latecomer.core.messages import TrainSpec
from latecomer.core.strategy import Merge, Strategy, no_compensation, same_lineage
from latecomer.strategies.latecomer.cached_aggregation import CachedAggregation
from latecomer.strategies.latecomer.mid_task_push import MidTaskPush
from latecomer.strategies.latecomer.personalisation import Personalisation
from latecomer.strategies.options import Count, NotNegative, Positive, Proportion
from latecomer.strategies.parts.clustering import Clustering
from latecomer.strategies.parts.compensation import Compensator
from latecomer.strategies.parts.dispatching import WhenReady
from latecomer.strategies.parts.inversion import Effort
from latecomer.strategies.parts.surrogates import SurrogateUpdates
from latecomer.strategies.parts.switch_off import Switch
from latecomer.strategies.parts.weighting import by_examples
from latecomer.strategies.recipe import recipe

UNUSUAL = 5.0  # times the usual staleness: who is later is repaired; the others would outvote them
TURNS = 3.0  # uploads of each member between two looks at a cluster
LISTEN = 3  # tasks of a device between two judgements
FEWEST = 20  # uploads between two looks, in small clusters
NEED = 0.4  # share of a device's own examples: who has more of them wrong is badly served


@recipe(
    "latecomer",
    "repairs what is late, remembers everybody, parts who contradict: each where it pays",
    "FedDC, MIFA, CA2FL, EchoPFL, PrivaAsyncFed",
)
def latecomer(
    share: Proportion = 0.1,
    wait: bool = False,
    step: Positive = 2.0,
    clip: NotNegative = 2.0,
    fade: NotNegative = 0.5,
    lead: Proportion = 1.0,
    reach: NotNegative = 0.3,
    place: Proportion = 1.0,
    repair: bool = True,
    spare: NotNegative = 2.0,
    surrogates: bool = True,
    clusters: Count = 4,
    broadcast: bool = True,
    keep: Proportion = 1.0,
    mix: Proportion = 1.0,
    calibrate: Proportion = 1.0,
    average: bool = True,
    samples: Count = 32,
    iterations: Count = 40,
    server_gflops: NotNegative = 10.0,
    save_estimates: bool = True,
) -> Strategy:
    """`docs/config.md` explains the options; `docs/studies/flagship.md` measures them."""
    weigh = by_examples()
    effort = Effort(samples, iterations=iterations)
    repairs = _repairs(effort, wait, spare, server_gflops, save_estimates) if repair else None
    absent = SurrogateUpdates(repairs, weigh) if repairs and surrogates else None
    # Judgements are for more than clusters.
    branches = _branches(clusters) if clusters > 1 or keep or mix or calibrate else None
    merge: Merge = CachedAggregation(share, step, clip, fade, lead, reach, place, absent)
    owning = None
    if keep or mix or calibrate or average:
        merge = owning = Personalisation(merge, keep, mix, branches, calibrate, average)
    return Strategy(
        name="latecomer",
        route=branches or same_lineage,
        compensate=repairs or no_compensation,
        weigh=weigh,
        merge=MidTaskPush(merge, behind=_turn(share)) if broadcast else merge,
        dispatch=WhenReady(branches, wait),
        prepare=_judging,
        personal=clusters > 1,
        own=owning,
    )


def _repairs(
    effort: Effort, wait: bool, spare: float, gflops: float, keep_estimates: bool
) -> Compensator:
    # Where devices wait for each other nobody is late by being slow alone.
    return Compensator(
        effort,
        switch=Switch(spare=spare),
        min_ratio=0.0 if wait else UNUSUAL,
        gflops=gflops,
        keep_estimates=keep_estimates,
    )


def _branches(most: int) -> Clustering:
    return Clustering(1, most, FEWEST, need=NEED, partial=False, turns=TURNS, listen=LISTEN)


def _turn(share: float) -> int:
    """Commits in which all have arrived once."""
    return max(2, round(1 / share)) if share else 100


def _judging(spec: TrainSpec) -> TrainSpec:
    # Examples are scarce, and one who finds a model wanting that has seen them is right a fortiori.
    # Nobody is badly served for having few classes: a cluster of those would forget the others.
    return replace(spec, hold_back=False, prior_correction=1.0)
