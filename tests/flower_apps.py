"""The example apps for Flower, as they are and with the two lines of docs/flower.md changed."""

import shutil
import subprocess
from pathlib import Path

from book import ROOT, blocks

APPS = ROOT / "examples" / "flower"
PAGE = ROOT / "docs" / "flower.md"


def migration() -> str:
    """The diff of the page."""
    (block,) = blocks(PAGE, "diff")
    return block.text


def migrated(folder: Path) -> Path:
    """A copy of the PyTorch app with the diff of the page applied."""
    app = folder / "torch_app"
    shutil.copytree(APPS / "torch_app", app, ignore=shutil.ignore_patterns("__pycache__", "*.pt"))
    file, lines = "", iter(migration().splitlines())
    for line in lines:
        if line.startswith("+++ "):
            file = line.split("/", 1)[1]
        elif line.startswith("-") and not line.startswith("---"):
            new, path = next(lines), app / file
            text = path.read_text()
            assert text.count(line[1:]) == 1, line
            assert new.startswith("+")
            path.write_text(text.replace(line[1:], new[1:]))
    return app


def changed_lines(app: Path) -> list[str]:
    """The lines that `diff` reports between the app and the original."""
    command = ["diff", "-r", "-U0", "-x", "__pycache__", str(APPS / "torch_app"), str(app)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [
        line for line in found.splitlines()
        if line[:1] in ("+", "-") and line[:3] not in ("+++", "---")
    ]  # fmt: skip
