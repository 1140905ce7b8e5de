"""The tables of docs/config.md have every key and option of the code, with its default."""

import re
import tomllib

from pydantic import BaseModel

from book import ROOT
from latecomer.strategies.recipe import recipes
from latecomer.study.config import Config

TEXT = (ROOT / "docs/config.md").read_text(encoding="utf-8")
CODE = re.compile(r"`([^`]+)`")
# In place of a default: it is in the row of another strategy.
AS_OTHERS = "as those of"


def section(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading."""
    part = re.split(r"\n#+ ", TEXT.partition(f"### {heading}\n")[2])[0]
    rows = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def value(cell: str) -> object:
    """A default as the table prints it, in TOML."""
    return tomllib.loads(f"x = {CODE.findall(cell)[0]}")["x"]


def defaults(recipe):
    """The options of a recipe with their defaults; those of a table as `table.option`."""
    for option, parameter in recipe.options.items():
        if isinstance(parameter.default, BaseModel):
            yield from ((f"{option}.{key}", default) for key, default in parameter.default)
        else:
            yield option, parameter.default


def test_every_option_of_every_strategy_is_there_with_its_default():
    listed: dict[tuple[str, str], str] = {}
    names: list[str] = []
    for first, option, _, default, *rest in section("`[strategy]`"):
        names = CODE.findall(first) or names
        for name in names:
            for each in CODE.findall(option):
                cell = default if not rest[0].startswith(AS_OTHERS) else ""
                assert listed.setdefault((name, each), cell) == cell, f"{name}: {each} twice"
    real = {
        (name, option): default
        for name, recipe in recipes().items()
        for option, default in defaults(recipe)
    }
    assert set(listed) == set(real)
    for key, cell in listed.items():
        assert not cell or value(cell) == real[key], f"{key}: {cell}, {real[key]!r}"


def check_keys(heading: str, table: type, scope: str = "") -> None:
    """The keys of one table of the config; `preset's` and gaps are defaults explained in words."""
    listed = {}
    for key, _, default, *_ in section(heading):
        for each in CODE.findall(key):
            if each.startswith(scope):
                listed[each.removeprefix(scope)] = default
    missing = set(table.model_fields) - set(listed)
    assert not set(listed) - set(table.model_fields), heading
    # Tables within a table have sections of their own.
    assert missing <= {"drift", "late"}, heading
    for key, cell in listed.items():
        if CODE.search(cell):
            default = table.model_fields[key].get_default(call_default_factory=True)
            assert value(cell) == (list(default) if isinstance(default, tuple) else default), key


def test_every_key_is_there_with_its_default():
    fields = Config.model_fields
    for name in ("data", "fleet", "model", "training", "submodels", "privacy", "server"):
        check_keys(f"`[{name}]`", fields[name].annotation)
    for name in ("app", "attack", "engine", "stop"):
        check_keys(f"`[{name}]`", fields[name].annotation)
    check_keys("`[log]`", fields["log"].annotation, "log.")
    for name in ("evaluate", "checkpoint"):
        check_keys("`[evaluate]` and `[checkpoint]`", fields[name].annotation, f"{name}.")
    for name, inner in (("data", "drift"), ("fleet", "late")):
        check_keys(f"`[{name}.{inner}]`", fields[name].annotation.model_fields[inner].annotation)
