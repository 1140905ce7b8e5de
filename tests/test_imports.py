"""Imports point one way: core <- device <- strategies <- engines <- study <- deploy <- cli."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import latecomer

SOURCE = Path(latecomer.__file__).parent

# room -> what it may import of latecomer beside itself
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "loading": {"errors"},
    "core": {"errors"},
    "data": {"errors", "loading"},
    "fleet": {"errors"},
    "device": {"errors", "loading", "core"},
    "strategies": {"errors", "loading", "core", "device"},
    "engines": {"errors", "loading", "core", "device", "strategies", "fleet"},
    "study": {"errors", "loading", "core", "device", "strategies", "engines", "fleet", "data"},
    "deploy": {"errors", "loading", "device", "data", "study"},
    "flower": {"errors", "core", "strategies", "engines", "study"},
    "cli": {
        "errors",
        "core",
        "device",
        "strategies",
        "engines",
        "fleet",
        "data",
        "study",
        "deploy",
    },
    "__main__": {"cli"},
}

FLOWER = {
    "flower.py",
    "deploy/warm.py",
    "engines/app_client.py",
    "engines/app_loading.py",
    "engines/flower.py",
    "engines/flower_client.py",
    "engines/flower_private.py",
    "engines/virtual_grid.py",
}


def modules_in(tree: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    """Every module that is imported, wherever in the file it stands, by its full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            yield ".".join(base)
            yield from (".".join([*base, alias.name]) for alias in node.names)


def imports_of(path: Path) -> set[str]:
    package = ("latecomer", *path.relative_to(SOURCE).parts[:-1])
    return set(modules_in(ast.parse(path.read_text(encoding="utf-8")), package))


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def rooms_in(modules: set[str]) -> set[str]:
    """The rooms that are named; names that `latecomer` itself offers have none."""
    second = {name.split(".")[1] for name in modules if name.startswith("latecomer.")}
    return second & set(ALLOWED)


FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def test_every_room_is_in_the_table() -> None:
    assert {room_of(path) for path in FILES} <= set(ALLOWED)
    assert len(FILES) > 50


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(SOURCE).as_posix())
def test_imports_point_one_way(path: Path) -> None:
    room = room_of(path)
    assert rooms_in(imports_of(path)) - {room} <= ALLOWED[room]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(SOURCE).as_posix())
def test_only_the_flower_engine_imports_flower(path: Path) -> None:
    flower = {name for name in imports_of(path) if name.split(".")[0] == "flwr"}
    assert not flower or path.relative_to(SOURCE).as_posix() in FLOWER


def test_the_command_line_does_not_import_flower() -> None:
    """It is an extra, and takes a second to import."""
    script = (
        "import sys, contextlib, io\n"
        "from latecomer.cli import main\n"
        "sys.argv = ['latecomer', '--help']\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "    main()\n"
        "sys.exit('flwr' in sys.modules or 'ray' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_no_pickle_near_disk_or_wire() -> None:
    for path in FILES:
        assert not imports_of(path) & {"pickle", "marshal", "shelve", "cloudpickle"}, path


def test_the_parser_sees_every_kind_of_import() -> None:
    """Of a file in latecomer/study: absolute, relative, and late ones in a function."""
    text = (
        "import latecomer.cli\n"
        "from latecomer import engines\n"
        "from ..fleet.late import lateness\n"
        "from .files import Table\n"
        "def f():\n    from latecomer.data.npz import read_npz\n"
    )
    found = set(modules_in(ast.parse(text), ("latecomer", "study")))
    assert rooms_in(found) == {"cli", "engines", "fleet", "study", "data"}
