"""Diao, Ding, Tarokh, HeteroFL: Computation and Communication Efficient FL, 2021.

Synchronous rounds in which every device trains the prefix channels it can carry; each coordinate
becomes the plain mean of those who trained it (section 3.2). Static batch normalisation has no
place here, where networks use GroupNorm; the scaler and the masked loss are left out.
"""

from dataclasses import replace

from latecomer.core.strategy import Strategy, full_weight
from latecomer.strategies.options import Count, NotNegative, Share
from latecomer.strategies.papers.fedavg import fedavg
from latecomer.strategies.recipe import recipe


@recipe(
    "heterofl",
    "synchronous rounds of sub-models, each coordinate averaged by those who trained it",
    "Diao et al. 2021",
    widths=True,
)
def heterofl(fraction: Share = 1.0, timeout: NotNegative = 0.0, min_devices: Count = 1) -> Strategy:
    """Options as those of `fedavg`. Every device counts alike, as in the paper."""
    plain = fedavg(fraction=fraction, timeout=timeout, min_devices=min_devices)
    return replace(plain, name="heterofl", weigh=full_weight)
