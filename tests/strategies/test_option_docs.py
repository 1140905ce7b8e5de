"""Every option of every recipe is documented in the recipe's docstring."""

import inspect
import re

import pytest

from latecomer.strategies.recipe import recipes


def documented(build) -> set[str]:
    """The names before the colon of each line `name: ...` or `name, name: as in ...`."""
    lines = re.findall(r"^    (\w+(?:, \w+)*): ", build.__doc__ or "", flags=re.MULTILINE)
    return {name for line in lines for name in line.split(", ")}


@pytest.mark.parametrize("name", recipes())
def test_every_option_has_a_line_and_every_line_an_option(name):
    build = recipes()[name].build
    assert documented(build) == set(inspect.signature(build).parameters)


def test_references_to_other_recipes_exist():
    for name, recipe in recipes().items():
        for line in re.findall(r"^    (.*): as in `([\w-]+)`", recipe.build.__doc__ or "", re.M):
            options, other = line
            assert set(options.split(", ")) <= documented(recipes()[other].build), (name, other)
