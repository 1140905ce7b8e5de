"""The five cases of docs/your-own.md: the page shows the files, and each of them learns."""

import ast
import runpy

import pytest

from book import ROOT, blocks

CASES = sorted((ROOT / "examples/your_own").glob("*.py"))
PAGE = ROOT / "docs/your-own.md"
MOST_LINES = 40
# Updates, and by how much the loss falls.
SMALL = {"images": (24, 0.95), "text": (12, 0.8), "table": (60, 0.5), "labels": (60, 0.9)}
SMALL |= {"lora": (60, 0.9)}
SLOW = {"images", "lora"}
by_case = pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)


def lines_of_code(text: str) -> int:
    """Lines that are neither empty nor a comment nor a docstring."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        if documented and ast.get_docstring(node) is not None:
            skipped |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(
        bool(line.strip()) and line.strip()[0] != "#" and number not in skipped
        for number, line in lines
    )


def test_the_page_shows_the_files():
    shown = [block.text for block in blocks(PAGE, "python")]
    assert sorted(shown) == sorted(path.read_text() for path in CASES)
    assert len(CASES) == 5


def test_the_first_example_of_the_readme_is_one_of_them():
    first = blocks(ROOT / "README.md", "python")[0]
    assert first.text in {path.read_text() for path in CASES}


@by_case
def test_a_case_is_short(path):
    assert lines_of_code(path.read_text()) < MOST_LINES


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else [])
        for path in CASES
    ],
)
def test_a_case_learns(path, tmp_path):
    case, (updates, share) = runpy.run_path(str(path)), SMALL[path.stem]
    given = {"updates": updates, "out": str(tmp_path / "run")}
    if path.stem == "table":
        given["path"] = case["made_up"](str(tmp_path / "energy.csv"))
    result = case["main"](**given)
    loss = result.metrics["loss"]
    assert loss.iloc[-1] < share * loss.iloc[0]
    assert result.summary["updates"] == updates
