"""Which labels a device trained on, read off the change of its output layer.

The gradient of the mean cross-entropy by the output bias is mean(softmax) - mean(one-hot label):
the change of the bias, divided by the effective learning rate, tells how often each class occurs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from latecomer.device.flat import FlatModel

EVIDENCE = 0.01  # a class below this share is not there


def output_bias(network: FlatModel) -> slice | None:
    """Where the bias of the output layer lies in the flat vector; None if it has none."""
    layout = network.layout
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        span = layout.span(name)
        inside = network.head.start <= span.start and span.stop <= network.head.stop
        if inside and shape == (network.num_classes,) and name.endswith("bias"):
            return span
    return None


def label_shares(
    network: FlatModel, base: Tensor, delta: Tensor, x: Tensor, rate: float
) -> Tensor | None:
    """The share of each class among the device's labels; None where the bias cannot tell.

    What the network predicts is taken on `x` and in the middle of before and after training.
    """
    place = output_bias(network)
    if place is None or rate <= 0:
        return None
    with torch.no_grad():
        before, after = (
            F.softmax(network.logits(params, x), 1).mean(0) for params in (base, base + delta)
        )
    shares = (delta[place] / rate + (before + after) / 2).clamp_min(0.0)
    shares = torch.where(shares < EVIDENCE * shares.sum(), 0.0, shares)
    total = shares.sum()
    return shares / total if torch.isfinite(total) and total > 0 else None


def spread(shares: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """`size` labels in proportion, one at least of every class there is room for; and weights.

    The weights are logits that make up for the rounding: the classes together count as `shares`.
    """
    wanted = shares * size
    counts = torch.maximum(wanted.floor(), (shares > 0).float())
    while counts.sum() > size:
        counts[torch.where(counts > 0, counts - wanted, -torch.inf).argmax()] -= 1
    while counts.sum() < size:
        counts[torch.where(shares > 0, wanted - counts, -torch.inf).argmax()] += 1
    labels = torch.repeat_interleave(torch.arange(len(shares)), counts.long())
    return labels, (shares[labels] / counts[labels]).log()
