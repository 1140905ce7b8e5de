"""Diao, Ding, Tarokh, HeteroFL: Computation and Communication Efficient FL, 2021.

Synchronous rounds in which every device trains a sub-model of the first channels of each layer.
Each coordinate becomes the unweighted mean over the devices that trained it (section 3.2). Static
batch normalisation does not apply, because networks use GroupNorm; the scaler and the masked loss
are left out.
"""

from dataclasses import replace

from latecomer.core.strategy import Strategy, full_weight
from latecomer.strategies.papers.fedavg import fedavg
from latecomer.strategies.recipe import recipe


@recipe(
    "heterofl",
    "synchronous rounds of sub-models, each coordinate averaged over those that cover it",
    "Diao et al. 2021",
    of=(fedavg,),
    widths=True,
)
def heterofl(plain: Strategy) -> Strategy:
    """The options of `fedavg`; widths are set in `[submodels]`.

    Every device has the same weight, as in the paper.
    """
    return replace(plain, name="heterofl", weigh=full_weight)
