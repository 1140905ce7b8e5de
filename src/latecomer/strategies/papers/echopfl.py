"""Li et al., EchoPFL: Asynchronous Personalized FL with On-Demand Staleness Control, 2024.

Devices are clustered by the L1 distance of their trained model to the cluster models (Eq. 1,
`parts.clustering`). An update is mixed into its cluster's model on arrival as in FedAsync,
w <- (1 - a) w + a w_i with a = alpha * s(tau). A new cluster model is broadcast to the cluster's
working devices when that is predicted to pay (Eq. 4, `parts.broadcasts`).
"""

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
    "clusters that form as updates arrive, with on-demand broadcasts of their models",
    "EchoPFL",
)
def echopfl(
    clusters: Count = 2,
    max_ratio: Annotated[float, Ge(1)] = 2.0,
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
    """Options:

    clusters: C, the number of first uploads that seed a cluster each.
    max_ratio: h_m; there are at most `max_ratio` * `clusters` clusters. 1.0 with `clusters` = 1
        keeps one model for all devices.
    every: R, uploads of a cluster between two reviews (split and merge).
    alpha: mixing weight of an update of staleness 0, up to 1.
    decay: s(tau), see `fedasync`; with `p` and `b`.
    p: exponent or slope of the decay.
    b: staleness up to which "hinge" and "reciprocal" do not discount.
    margin: factor, at most 1, by which another cluster model must be nearer for a device to change.
    gap: a device's error is high if it exceeds the median by `gap` times the median.
    need: a cluster whose median error stays above this is split; in units of `measure`.
    measure: "error", the share of wrong predictions, or "feedback", the paper's chi-squared of
        label frequencies (Eq. 3), which cannot separate permuted labels.
    ask: uploads of a device between two offers of all cluster models; 0: no offers.
    partial: train only the output layer of a new cluster until other devices may join it.
    broadcast: "never", "always", "every-n", "oracle" (Eq. 4, one commit late) or "predictor".
    broadcast_every: commits between broadcasts with "every-n".
    """
    clustering = Clustering(
        clusters, int(max_ratio * clusters + 1e-9), every, margin, gap, need, measure, ask, partial
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
