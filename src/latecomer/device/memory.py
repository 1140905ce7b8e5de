"""What a device keeps from one task to the next, for training programs that ask for it.

Nothing of it ever leaves the device by itself.
"""

from torch import Tensor
from torch.linalg import vector_norm

from latecomer.core.messages import Task, TrainSpec

# A tensor in it is replaced, never written into: it may be shared with a task or an update.
DeviceMemory = dict[str, Tensor]


def balanced(delta: Tensor, spec: TrainSpec, memory: DeviceMemory) -> Tensor:
    """The delta along zeta = s - s' + h: this task's gradient, the previous one, and their mean.

    A task's gradient is its delta over its learning rate. h <- beta h + (1 - beta) s, beginning
    with 0. For beta = 0 the last two terms cancel. Chen et al. 2020 (ASO-Fed), local update.
    """
    step = spec.lr * spec.lr_scale
    uphill = delta / -step
    previous, mean = _recall(memory, "gradient", delta), _recall(memory, "mean", delta)
    memory["gradient"] = uphill
    if previous is None or mean is None:
        memory["mean"] = (1 - spec.balance) * uphill
        return delta
    memory["mean"] = spec.balance * mean + (1 - spec.balance) * uphill
    return delta.add(mean - previous, alpha=-step)


def if_new(delta: Tensor, task: Task, memory: DeviceMemory) -> Tensor | None:
    """The delta to send; None if ||delta - sent||^2 <= lazy * ||w - w'||^2: little has changed.

    `sent` is what was last sent; w and w' are the models of this task and of the one before, so
    that a device can tell by itself. Lu et al. 2020 (PAFLM), self-adaptive threshold.
    """
    sent, before = _recall(memory, "sent", delta), _recall(memory, "model", delta)
    carried = _recall(memory, "carried", delta)
    if carried is not None:
        delta = delta + carried
    memory["model"] = task.params
    memory.pop("carried", None)
    if sent is not None and before is not None:
        change, movement = vector_norm(delta - sent), vector_norm(task.params - before)
        if change.item() ** 2 <= task.spec.lazy * movement.item() ** 2:
            if task.spec.accumulate_residual:
                memory["carried"] = delta
            return None
    memory["sent"] = delta
    return delta


def _recall(memory: DeviceMemory, name: str, like: Tensor) -> Tensor | None:
    """What is kept under `name`; a device that has changed its sub-model begins anew."""
    kept = memory.get(name)
    return kept if kept is not None and kept.shape == like.shape else None
