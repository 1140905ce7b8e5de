"""Li et al., EchoPFL: Asynchronous Personalized FL with On-Demand Staleness Control, 2024."""

from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge

from latecomer.core.messages import Contribution
from latecomer.core.strategy import ServerView, Strategy, Weigh
from latecomer.strategies.options import Count, CountOrOff, NotNegative, Share
from latecomer.strategies.papers.fedasync import DecayName, staleness_decay
from latecomer.strategies.parts.broadcasts import Broadcasting, Policy
from latecomer.strategies.parts.clustering import Clustering, Measure
from latecomer.strategies.parts.dispatching import ClusterDispatch
from latecomer.strategies.parts.weighting import by_staleness
from latecomer.strategies.recipe import recipe


@dataclass
class SeedsInFull:
    """Weigh: 1 for the update that seeds a cluster, whose model it becomes; else `weigh`."""

    clustering: Clustering
    weigh: Weigh

    def __call__(self, contribution: Contribution, view: ServerView) -> float:
        seeds = contribution.task.id == self.clustering.seed_task
        return 1.0 if seeds else self.weigh(contribution, view)


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
    measure: Measure = "error",
    ask: CountOrOff = 10,
    partial: bool = False,
    broadcast: Policy = "predictor",
    broadcast_every: Count = 5,
) -> Strategy:
    """`clusters` is C, `most` is h_m, `every` is R."""
    clustering = Clustering(
        clusters, int(most * clusters + 1e-9), every, margin, gap, need, measure, ask, partial
    )
    plain = by_staleness(staleness_decay(decay, p, b), scale=alpha)
    feedback = clustering.max_clusters > 1
    never = broadcast == "never"
    return Strategy(
        name="echopfl",
        route=clustering,
        weigh=SeedsInFull(clustering, plain),
        dispatch=ClusterDispatch(clustering),
        observers=() if never else (Broadcasting(broadcast, broadcast_every),),
        prepare=lambda spec: replace(spec, feedback=feedback),
        personal=True,
    )
