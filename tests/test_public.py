"""The public surface is a fact: these names, each typed, documented, and shown by an example."""

import inspect
import subprocess
import sys
import typing

import pytest

import latecomer
from book import ROOT, blocks

# A name that leaves, or joins, is a change that users see: CHANGELOG.md, docs/api.md.
NAMES = [
    "AsyncStrategy",
    "BadInput",
    "Bounds",
    "Comparison",
    "FlatModel",
    "GridTransport",
    "Networks",
    "Result",
    "RunFailed",
    "Server",
    "Strategy",
    "TrainSpec",
    "advise",
    "build_strategy",
    "client_app",
    "compare",
    "flat_model",
    "load",
    "load_dataset",
    "recipe",
    "recipes",
    "run",
    "serve",
]
API = ROOT / "docs/api.md"

# Types of Flower in annotations, which are not imported with the names.
FLOWER = dict.fromkeys(("ArrayRecord", "ConfigRecord", "EvaluateFn", "Grid", "Result"), object)

by_name = pytest.mark.parametrize("name", NAMES)


def test_it_is_exactly_this():
    assert latecomer.__all__ == NAMES
    assert sorted(latecomer._WHERE) == NAMES
    assert set(dir(latecomer)) == {*NAMES, "__version__"}


def test_type_checkers_see_the_same():
    """What is imported for them alone is what is imported when it is used."""
    source = inspect.getsource(latecomer)
    promised = source.partition("if TYPE_CHECKING:")[2]
    seen = {
        word.strip(): line.split()[1]
        for line in promised.strip().splitlines()
        for word in line.partition(" import ")[2].split(",")
    }
    assert seen == latecomer._WHERE
    assert (ROOT / "src/latecomer/py.typed").is_file()


def test_an_unknown_name_is_an_error():
    with pytest.raises(AttributeError, match="nothing"):
        _ = latecomer.nothing


def test_a_name_of_an_earlier_version_is_an_error_that_names_the_new_one():
    with pytest.raises(AttributeError, match=r"GridPost is now latecomer\.GridTransport"):
        _ = latecomer.GridPost


@by_name
def test_it_has_a_docstring(name):
    text = vars(getattr(latecomer, name)).get("__doc__") or getattr(latecomer, name).__doc__
    first = text.strip().splitlines()[0]
    assert len(first) > 15
    assert first.endswith((".", ":", ";")) or "." in text
    # What a dataclass makes up by itself.
    assert not first.startswith(f"{name}(")


@by_name
def test_its_signature_is_annotated(name):
    found = getattr(latecomer, name)
    if inspect.isclass(found) and issubclass(found, Exception):
        return
    called = found.__init__ if inspect.isclass(found) else found
    signature = inspect.signature(called)
    for parameter in signature.parameters.values():
        if parameter.name != "self":
            assert parameter.annotation is not parameter.empty, parameter
    assert signature.return_annotation is not signature.empty


@by_name
def test_its_methods_are_annotated(name):
    found = getattr(latecomer, name)
    if not inspect.isclass(found):
        return
    for method, called in vars(found).items():
        if not method.startswith("_") and inspect.isfunction(called):
            hints = typing.get_type_hints(called, {**vars(typing), **FLOWER})
            assert "return" in hints, method


@by_name
def test_the_page_names_it_and_uses_it(name):
    """The examples themselves are run by tests/test_docs.py."""
    table = [line for line in API.read_text().splitlines() if line.startswith("| `")]
    assert any(f"`{name}`" in line for line in table)
    code = "".join(block.text for block in blocks(API, "python") if not block.exempt)
    if name == "RunFailed":  # told in words: it takes a broken disk to show it
        assert "`RunFailed`" in API.read_text()
    else:
        assert f"latecomer.{name}" in code or f"{name}(" in code or f"except {name}" in code


def test_the_table_has_nothing_else():
    table = [line for line in API.read_text().splitlines() if line.startswith("| `")]
    told = {word for line in table for word in line.split("|")[1].replace("`", "").split(", ")}
    assert {word.strip() for word in told} == set(NAMES)


def test_to_import_it_is_to_import_nothing_heavy():
    script = (
        "import sys, time\n"
        "start = time.process_time()\n"
        "import latecomer\n"
        "took = time.process_time() - start\n"
        "heavy = {'torch', 'flwr', 'pandas', 'numpy', 'pydantic', 'typer'} & set(sys.modules)\n"
        "sys.exit(f'{heavy} {took}' if heavy or took > 0.2 else 0)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_names_of_a_flower_app_come_without_flower():
    """They need the extra `flower` when they are used, not when they are imported."""
    script = (
        "import sys\n"
        "sys.modules['flwr'] = None\n"
        "from latecomer import AsyncStrategy, GridTransport, client_app, serve\n"
        "sys.exit(any(m.startswith('flwr.') for m in sys.modules))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_flower_app_of_the_page_learns(tmp_path, monkeypatch, capsys):
    """Both files of docs/api.md, over Flower's own messages."""
    pytest.importorskip("flwr", reason="needs the extra 'flower'")
    from flower_grid import ThreadGrid

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LATECOMER_STATE", str(tmp_path / "devices"))
    client, server = (each for each in blocks(API, "python") if each.file)
    (tmp_path / client.file).write_text(client.text)
    variables: dict = {}
    exec(compile(client.text, str(client), "exec"), variables)
    grid = ThreadGrid(variables["app"], {100 + i: {"device-id": f"d{i}"} for i in range(3)})
    try:
        exec(compile(server.text, str(server), "exec"), variables)
        variables["main"](grid, None)
    finally:
        sys.modules.pop("client_app", None)
    assert "updates" in capsys.readouterr().out
    assert latecomer.load(tmp_path / "served").events["event"].eq("commit").sum() == 3
