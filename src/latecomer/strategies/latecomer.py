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
from latecomer.core.strategy import Merge, Strategy, as_it_is, stay_home
from latecomer.strategies.branches import Branches
from latecomer.strategies.compensation import Compensator
from latecomer.strategies.dispatching import WhenReady
from latecomer.strategies.inversion import Effort
from latecomer.strategies.options import Count, NotNegative, Positive, Proportion
from latecomer.strategies.owning import Owning
from latecomer.strategies.recipe import recipe
from latecomer.strategies.roll_call import RollCall
from latecomer.strategies.stand_ins import StandIns
from latecomer.strategies.switching import Switch
from latecomer.strategies.telling import Telling
from latecomer.strategies.weighting import by_examples

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
    stand_in: bool = True,
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
    stand_ins = StandIns(repairs, weigh) if repairs and stand_in else None
    # Judgements are for more than clusters.
    branches = _branches(clusters) if clusters > 1 or keep or mix or calibrate else None
    merge: Merge = RollCall(share, step, clip, fade, lead, reach, place, stand_ins)
    owning = None
    if keep or mix or calibrate or average:
        merge = owning = Owning(merge, keep, mix, branches, calibrate, average)
    return Strategy(
        name="latecomer",
        route=branches or stay_home,
        compensate=repairs or as_it_is,
        weigh=weigh,
        merge=Telling(merge, behind=_turn(share)) if broadcast else merge,
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


def _branches(most: int) -> Branches:
    return Branches(1, most, FEWEST, need=NEED, partial=False, turns=TURNS, listen=LISTEN)


def _turn(share: float) -> int:
    """Commits in which all have arrived once."""
    return max(2, round(1 / share)) if share else 100


def _judging(spec: TrainSpec) -> TrainSpec:
    # Examples are scarce, and one who finds a model wanting that has seen them is right a fortiori.
    # Nobody is badly served for having few classes: a cluster of those would forget the others.
    return replace(spec, hold_back=False, mix=1.0)
