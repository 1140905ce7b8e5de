"""The class shares of a device's training data, estimated from the change of its output bias.

The gradient of the mean cross-entropy with respect to the output bias is mean(softmax) -
mean(one-hot label). So the change of the bias, divided by the effective learning rate, plus the
mean softmax is the share of each class.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from latecomer.device.flat import FlatModel

MIN_LABEL_SHARE = 0.01  # smaller shares are set to 0


def output_bias(network: FlatModel) -> slice | None:
    """The coordinates of the output layer's bias in the flat vector; None if it has no bias.

    None if the outputs are not the logits of classes.
    """
    layout = network.layout
    if not network.objective.classifies:
        return None
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        span = layout.span(name)
        inside = network.head.start <= span.start and span.stop <= network.head.stop
        if inside and shape == (network.num_classes,) and name.endswith("bias"):
            return span
    return None


def label_shares(
    network: FlatModel, base: Tensor, delta: Tensor, x: Tensor, rate: float
) -> Tensor | None:
    """The share of each class among the device's labels; None without a usable output bias.

    The mean softmax is that on `x`, averaged over the models before and after training.
    """
    bias = output_bias(network)
    if bias is None or rate <= 0 or network.objective.loss != "cross-entropy":
        return None
    with torch.no_grad():
        before, after = (
            F.softmax(network.logits(params, x), 1).mean(0) for params in (base, base + delta)
        )
    shares = (delta[bias] / rate + (before + after) / 2).clamp_min(0.0)
    shares = torch.where(shares < MIN_LABEL_SHARE * shares.sum(), 0.0, shares)
    total = shares.sum()
    return shares / total if torch.isfinite(total) and total > 0 else None


def allocate_labels(shares: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """`size` labels in proportion to `shares`, and a weight logit for each label.

    Every class with a share gets at least one label if there are enough. A softmax of the logits
    gives each class the weight `shares` in spite of the rounding.
    """
    exact = shares * size
    counts = torch.maximum(exact.floor(), (shares > 0).float())
    while counts.sum() > size:
        counts[torch.where(counts > 0, counts - exact, -torch.inf).argmax()] -= 1
    while counts.sum() < size:
        counts[torch.where(shares > 0, exact - counts, -torch.inf).argmax()] += 1
    labels = torch.repeat_interleave(torch.arange(len(shares)), counts.long())
    return labels, (shares[labels] / counts[labels]).log()
