"""Whether several parameter vectors of a network can be trained in one batch (torch.func.vmap)."""

import torch
from torch import Tensor

from latecomer.core.messages import TrainSpec
from latecomer.device.flat import FlatModel
from latecomer.device.training import Plan, local_update
from latecomer.loading import first_line


def reason_not_to_batch(model: FlatModel) -> str | None:
    """Why training under vmap fails for this network, found by training two; None if it works."""
    params = torch.stack([model.init(0)] * 2)
    x = torch.zeros(2, 1, *model.input_shape)
    y = torch.zeros(2, 1, dtype=torch.int64)
    plan = Plan(torch.zeros(2, 1, 1, dtype=torch.int64), torch.ones(2, 1, 1))

    def train(params: Tensor, x: Tensor, y: Tensor, order: Tensor, mask: Tensor) -> Tensor:
        plan = Plan(order, mask)
        return local_update(model, params, x, y, TrainSpec(), plan, functional=True, ragged=True)

    try:
        torch.func.vmap(train)(params, x, y, *plan)
    except Exception as error:  # whatever a user's network does under vmap
        return f"its network cannot be batched: {first_line(error)}"
    return None
