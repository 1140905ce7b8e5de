"""Li et al., EchoPFL: Asynchronous Personalized FL with On-Demand Staleness Control, 2024."""

from dataclasses import replace
from typing import Annotated

from annotated_types import Ge

from latecomer.core.messages import Contribution, TrainSpec
from latecomer.core.strategy import Mix, ServerView, Strategy
from latecomer.strategies.options import Count, CountOrOff, NotNegative, Share
from latecomer.strategies.papers.fedasync import DecayName, staleness_decay
from latecomer.strategies.parts.broadcasts import Broadcasting, Policy
from latecomer.strategies.parts.clustering import Clustering, Judge
from latecomer.strategies.parts.dispatching import WhenReady
from latecomer.strategies.parts.weighting import by_staleness
from latecomer.strategies.recipe import recipe


@recipe(
    "echopfl",
    "personalised clusters that form as updates arrive, broadcast when it pays",
    "EchoPFL",
)
def echopfl(
    clusters: Count = 2,
    most: Annotated[float, Ge(1)] = 2.0,
    every: Count = 20,
    alpha: Share = 0.6,
    decay: DecayName = "polynomial",
    p: NotNegative = 0.5,
    b: NotNegative = 4.0,
    margin: Share = 0.8,
    gap: NotNegative = 1.0,
    need: NotNegative = 0.2,
    judge: Judge = "error",
    ask: CountOrOff = 10,
    partial: bool = False,
    broadcast: Policy = "predictor",
    broadcast_every: Count = 5,
) -> Strategy:
    """`clusters` is C, `most` is h_m, `every` is R."""
    branches = Clustering(
        clusters, int(most * clusters + 1e-9), every, margin, gap, need, judge, ask, partial
    )
    plain = by_staleness(staleness_decay(decay, p, b), scale=alpha)

    def weigh(contribution: Contribution, view: ServerView) -> float:
        seeds = contribution.task.id == branches.seeding
        return 1.0 if seeds else plain(contribution, view)

    def ask_for_feedback(spec: TrainSpec) -> TrainSpec:
        return replace(spec, feedback=branches.most > 1)

    return Strategy(
        name="echopfl",
        route=branches,
        weigh=weigh,
        merge=Mix() if broadcast == "never" else Broadcasting(Mix(), broadcast, broadcast_every),
        dispatch=WhenReady(branches),
        prepare=ask_for_feedback,
        personal=True,
    )
