"""Memory of a device between tasks: gradient balancing (ASO-Fed) and lazy upload (PAFLM).

The memory itself is never sent.
"""

from torch import Tensor
from torch.linalg import vector_norm

from latecomer.core.messages import Task, TrainSpec

# By name. A tensor is replaced, never written into: a task or an update may share it.
DeviceMemory = dict[str, Tensor]


def balanced(delta: Tensor, spec: TrainSpec, memory: DeviceMemory) -> Tensor:
    """The delta along zeta = s - s' + h: this task's gradient, the previous one, their average.

    A task's gradient is its delta over minus its learning rate. h <- beta h + (1 - beta) s with
    beta = `spec.balance`, starting at 0. For beta = 0 the last two terms cancel.
    Chen et al. 2020 (ASO-Fed), local update.
    """
    step = spec.lr * spec.lr_scale
    uphill = delta / -step
    previous, mean = _stored(memory, "gradient", delta), _stored(memory, "mean", delta)
    memory["gradient"] = uphill
    if previous is None or mean is None:
        memory["mean"] = (1 - spec.balance) * uphill
        return delta
    memory["mean"] = spec.balance * mean + (1 - spec.balance) * uphill
    return delta.add(mean - previous, alpha=-step)


def lazy_upload(delta: Tensor, task: Task, memory: DeviceMemory) -> Tensor | None:
    """The delta to send; None if ||delta - sent||^2 <= lazy * ||w - w'||^2.

    `sent` is the delta that was last sent, w and w' are the models of this task and of the one
    before. With `accumulate_residual` an unsent delta is added to the next.
    Lu et al. 2020 (PAFLM), self-adaptive threshold.
    """
    sent, before = _stored(memory, "sent", delta), _stored(memory, "model", delta)
    residual = _stored(memory, "residual", delta)
    if residual is not None:
        delta = delta + residual
    memory["model"] = task.params
    memory.pop("residual", None)
    if sent is not None and before is not None:
        change, movement = vector_norm(delta - sent), vector_norm(task.params - before)
        if change.item() ** 2 <= task.spec.lazy * movement.item() ** 2:
            if task.spec.accumulate_residual:
                memory["residual"] = delta
            return None
    memory["sent"] = delta
    return delta


def _stored(memory: DeviceMemory, name: str, like: Tensor) -> Tensor | None:
    """The tensor stored under `name`; None if there is none of this shape (another sub-model)."""
    found = memory.get(name)
    return found if found is not None and found.shape == like.shape else None
