"""The tables of docs/papers.md name functions that are in the files they name."""

import re

import pytest

from book import ROOT

ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in (ROOT / "docs/papers.md").read_text(encoding="utf-8").splitlines()
]
NAMED = sorted(
    {
        (name, row[-1].strip("`"))
        for row in ROWS
        if len(row) > 2 and re.fullmatch(r"`[\w/]+\.py`", row[-1])
        for name in re.findall(r"`(\w+)`", row[-2])
    }
)


def test_there_are_many():
    assert len(NAMED) > 80


@pytest.mark.parametrize(("name", "file"), NAMED)
def test_the_file_defines_the_function(name, file):
    text = (ROOT / "src/latecomer" / file).read_text(encoding="utf-8")
    assert re.search(rf"(def|class) {name}\b", text)
