"""The app that `latecomer deploy new` makes."""

import ast
import importlib.util
import sys
import tomllib

import numpy as np
import pytest

import latecomer
from latecomer.deploy.flower_app import app_config
from latecomer.deploy.scaffold import make_app, names_for, parse_data
from latecomer.errors import BadInput

NET = """
from math import prod
from torch import nn

class Net(nn.Sequential):
    def __init__(self, input_shape, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(prod(input_shape), num_classes))
"""


def test_an_app_is_complete(tmp_path):
    lines = list(make_app(tmp_path / "My App", "mlp", "digits"))
    assert "deploy up" in lines[1]
    folder = tmp_path / "My App"
    found = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    package = ["__init__.py", "client_app.py", "server_app.py", "task.py"]
    assert found == [*(f"my_app/{name}" for name in package), "pyproject.toml"]
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["name"] == "my-app"
    assert app_config(folder)["strategy"] == "latecomer"
    for path in (folder / "my_app").iterdir():
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            module = getattr(node, "module", None) or ""
            assert not module.startswith("latecomer."), "an app imports public names only"
            if module == "latecomer":
                assert {alias.name for alias in node.names} <= set(latecomer.__all__)
        assert "$" not in text


def test_its_model_and_data_are_those_that_were_asked_for(tmp_path, monkeypatch):
    pytest.importorskip("flwr", reason="needs the extra 'flower'")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mynets.py").write_text(NET)
    x = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    np.savez(tmp_path / "mine.npz", x=x, y=np.arange(40) % 4)
    list(make_app(tmp_path / "an-app", "mynets:Net", "mine.npz"))
    monkeypatch.syspath_prepend(str(tmp_path / "an-app"))
    monkeypatch.chdir("/")
    spec = importlib.util.find_spec("an_app.task")
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    network = task.model()
    assert network.layout.size == 6 * 4 + 4

    class Context:
        node_config = {"partition-id": 1, "num-partitions": 2}  # noqa: RUF012

    x, y = task.load_data(Context)
    assert len(x) == len(y) == 16
    assert 0.0 <= task.accuracy(network, network.init(1)) <= 1.0
    sys.modules.pop("an_app", None)
    sys.modules.pop("an_app.mynets", None)


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ("mlpp", "digits", "did you mean 'mlp'"),
        ("mlp", "digts", "did you mean 'digits'"),
        ("mlp", "nowhere.npz", "nowhere.npz: no such file"),
        ("mlp", "npz", "needs a path"),
        ("nosuchmodule:Net", "digits", "cannot import"),
        ("resnet18", "digits:here", "takes no path"),
    ],
)
def test_mistakes_are_errors_before_anything_is_written(tmp_path, model, data, message):
    with pytest.raises(BadInput, match=message):
        list(make_app(tmp_path / "app", model, data))
    assert not (tmp_path / "app").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("x")
    for folder in (tmp_path, tmp_path / "mine"):
        with pytest.raises(BadInput, match="is not empty"):
            list(make_app(folder, "mlp", "digits"))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_names():
    assert names_for("My_First app!") == ("my-first-app", "my_first_app")
    assert names_for("torch") == ("torch", "torch_app")
    for bad in ("9lives", "---", "_"):
        with pytest.raises(BadInput, match="begin with a letter"):
            names_for(bad)
    assert parse_data("digits") == ("digits", "")
    assert parse_data("uci-har:/data/har") == ("uci-har", "/data/har")
