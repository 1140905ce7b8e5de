"""The device that networks are computed on."""

import pytest
import torch

from latecomer.core.messages import Task, TrainSpec
from latecomer.device.accelerator import torch_device
from latecomer.device.client import Client
from latecomer.device.flat import flat_model
from latecomer.errors import BadInput
from latecomer.study.config import parse
from latecomer.study.experiment import Experiment


def test_auto_is_what_the_machine_has() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert torch_device("auto") == torch.device(expected)
    assert torch_device("cpu") == torch.device("cpu")
    resolved = Experiment(parse({"stop": {"updates": 1}})).config.engine.device
    assert resolved == expected


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "tpu", ""])
def test_unknown_names(name: str) -> None:
    with pytest.raises(BadInput, match="must be auto, cpu, cuda, cuda:N or mps"):
        torch_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize("name", ["cuda", "cuda:3", "mps"])
def test_a_device_that_is_not_there(name: str) -> None:
    with pytest.raises(BadInput, match="this machine has"):
        torch_device(name)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_results_come_back_and_do_not_depend_on_the_call(optimizer: str) -> None:
    spec = TrainSpec(optimizer=optimizer)
    x, y = torch.randn(20, 6), torch.randint(0, 3, (20,))
    deltas = []
    for device in (None, torch.device("cpu")):
        model = flat_model("mlp", (6,), 3)
        if device is not None:
            model.to(device)
        task = Task(0, 0, 0, "main", 0, spec, model.init(0))
        deltas.append(Client(0, model, x, y, 0).perform(task).delta)
    assert torch.equal(*deltas)
    assert deltas[0].device == torch.device("cpu")


def test_the_computation_moves_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device shapes are computed: every operand of the network must be there."""
    model = flat_model("lenet", (1, 8, 8), 3)
    params = model.init(0)
    model.to(torch.device("meta"))
    seen: list[str] = []
    model.module.register_forward_hook(lambda _m, given, out: seen.append(out.device.type))
    with pytest.raises(NotImplementedError, match="meta"):  # its values cannot come back
        model.logits(params, torch.zeros(2, 1, 8, 8))
    assert seen == ["meta"]
    spec = TrainSpec(local_epochs=1, batch_size=2)
    task = Task(0, 0, 0, "main", 0, spec, params)
    with pytest.raises(NotImplementedError, match="meta"):
        Client(0, model, torch.zeros(5, 1, 8, 8), torch.zeros(5, dtype=torch.int64), 0).perform(
            task
        )
    assert seen == ["meta"] * 4  # all three steps were taken there
