"""Models of a run as files of other programs."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from latecomer.errors import BadInput
from latecomer.study.export import export

WEIGHTS = {"0.weight": torch.arange(6.0).reshape(2, 3), "0.bias": torch.ones(2)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with two clusters, of which the models are there alone."""
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    save_file({"0.bias": torch.zeros(2)}, tmp_path / "model-branch-1.safetensors")
    return tmp_path


def test_every_cluster_is_written(run: Path) -> None:
    paths = list(export(run, "torch"))
    assert [path.name for path in paths] == ["model-branch-1.pt", "model.pt"]
    found = torch.load(run / "export" / "model.pt", weights_only=True)
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)
    list(export(run, "safetensors", run / "elsewhere"))
    assert load_file(run / "elsewhere" / "model.safetensors").keys() == WEIGHTS.keys()


def test_what_cannot_be_exported_is_one_line(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"has no model\.safetensors"):
        list(export(run / "nowhere", "torch"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match="needs onnx and onnxscript: pip install onnx onnxscript"):
        list(export(run, "onnx"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(BadInput, match=r"no config\.toml .a deployed run.*--format torch"):
        list(export(run, "onnx"))
    (run / "model.safetensors").write_bytes(b"short")
    with pytest.raises(BadInput, match="cannot be read"):
        list(export(run, "torch"))
    assert not (run / "export" / "model.pt").exists()


@pytest.mark.slow
def test_onnx_computes_what_the_network_does(start, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    from latecomer.study.config import load_config
    from latecomer.study.experiment import Experiment

    folder, _ = start("stop.updates=10")
    (path,) = export(folder, "onnx", tmp_path)
    experiment = Experiment(load_config(folder / "config.toml"))
    module, x = experiment.model.module.eval(), experiment.federation.test.x[:5]
    module.load_state_dict(load_file(folder / "model.safetensors"))
    (found,) = ReferenceEvaluator(onnx.load(path)).run(None, {"input": x.numpy()})
    assert torch.allclose(torch.tensor(found), module(x), atol=1e-5)
