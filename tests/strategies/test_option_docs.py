"""Every option of every recipe is documented in the docstring of the function that has it."""

import re

import pytest

from latecomer.strategies.recipe import recipes


def documented(build) -> set[str]:
    """The names before the colon of each line `name: ...` or `name, name: as in ...`."""
    text = getattr(build, "func", build).__doc__ or ""
    lines = re.findall(r"^    (\w+(?:, \w+)*): ", text, flags=re.MULTILINE)
    return {name for line in lines for name in line.split(", ")}


def documented_with_inherited(recipe) -> set[str]:
    return set().union(*map(documented, (recipe.build, *recipe.of)))


@pytest.mark.parametrize("name", recipes())
def test_every_option_has_a_line_and_every_line_an_option(name):
    recipe = recipes()[name]
    assert documented_with_inherited(recipe) == set(recipe.options)
    for each in recipe.of:
        inherited = getattr(each, "func", each).__name__.replace("_", "-")
        assert f"`{inherited}`" in recipe.build.__doc__


def test_references_to_other_recipes_exist():
    for name, recipe in recipes().items():
        for line in re.findall(r"^    (.*): as in `([\w-]+)`", recipe.build.__doc__ or "", re.M):
            options, other = line
            known = documented_with_inherited(recipes()[other])
            assert set(options.split(", ")) <= known, (name, other)
