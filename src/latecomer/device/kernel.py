"""The numba kernel of local SGD: which training specs it covers, and the call from torch."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from threadpoolctl import threadpool_limits
from torch import Tensor

from latecomer.core.messages import TrainSpec
from latecomer.device.objective import classification
from latecomer.device.optimizers import OptimizerState, initial_state
from latecomer.device.program import Program, program_of

if TYPE_CHECKING:
    from latecomer.device.flat import FlatModel
    from latecomer.device.training import Plan


class CompiledKernel:
    """Local SGD on a sequential network, compiled with numba (the extra `fast`)."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._limited = False

    def covers(self, spec: TrainSpec) -> bool:
        """Whether the kernel can run this training program."""
        clips = spec.clip == 0 or (self.program.only_linear and spec.clip_norm == 2)
        return spec.optimizer == "sgd" and not spec.last_layer_only and clips

    def train(
        self,
        params: Tensor,
        anchor: Tensor,
        state: OptimizerState | None,
        x: Tensor,
        y: Tensor,
        spec: TrainSpec,
        plan: "Plan",
    ) -> tuple[Tensor, OptimizerState]:
        """What `resumed_update` computes, up to rounding."""
        from latecomer.device.compiled import train

        if not self._limited:
            # numba multiplies matrices with the BLAS that scipy brings. Ours are small: more than
            # one thread only costs. The limit affects only libraries that are loaded already.
            import_module("scipy.linalg.cython_blas")
            threadpool_limits(1, "blas")
            self._limited = True
        whole = params.detach().clone()
        state = state or initial_state(whole)
        velocity = state.first.clone()
        train(
            self.program.table,
            self.program.inputs,
            whole.numpy(),
            anchor.detach().numpy(),
            velocity.numpy(),
            x.flatten(1).contiguous().numpy(),
            y.numpy(),
            plan.order.numpy(),
            plan.mask.numpy(),
            spec.lr * spec.lr_scale,
            spec.momentum,
            spec.weight_decay,
            spec.prox,
            spec.clip,
        )
        return whole, state._replace(first=velocity)


def compiled_kernel(model: "FlatModel") -> CompiledKernel | str:
    """The kernel for this model, or the reason why there is none."""
    if model.objective != classification(model.num_classes):
        return "the compiled kernel computes cross-entropy over classes only"
    program = program_of(model.module, model.layout, model.input_shape)
    if program is None:
        return "the network has layers that the compiled kernel does not support"
    if find_spec("numba") is None:
        return "numba is not installed (pip install 'latecomer[fast]')"
    return CompiledKernel(program)
