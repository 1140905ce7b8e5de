"""docs/adding-a-paper.md: its strategy is one short file, and passes what every strategy must."""

import os
import shlex
import subprocess
import sys

import pytest

from book import ROOT, blocks

PAGE = ROOT / "docs/adding-a-paper.md"
NAME = "async-momentum"
# A module beside the package's own, as if it had been saved there.
INSTALL = """
import sys
from pathlib import Path

import latecomer.strategies.papers

latecomer.strategies.papers.__path__.append(str(Path(__file__).parent / "papers"))
"""


def the_blocks() -> tuple[str, str]:
    strategy, test = blocks(PAGE, "python")
    return strategy.text, test.text


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the strategy where the package finds it, and its test."""
    folder = tmp_path_factory.mktemp("added")
    strategy, test = the_blocks()
    (folder / "papers").mkdir()
    (folder / "papers" / "async_momentum.py").write_text(strategy)
    (folder / "installed.py").write_text(INSTALL)
    (folder / "test_async_momentum.py").write_text(test)
    (folder / "latecomer_here.py").write_text(
        "import installed\nfrom latecomer.cli import main\nmain()\n"
    )
    return folder


def python(folder, *args):
    paths = [str(folder), str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_it_is_one_file_under_80_lines():
    strategy, test = the_blocks()
    assert len(strategy.splitlines()) < 80
    assert f'@recipe("{NAME}"' in strategy
    compile(strategy, "strategy", "exec")
    assert "def test_" in test


# The run that the page shows, made short; in the process of the other tests.
COMMAND = """
import sys

from latecomer import cli


def test_the_run_of_the_page(monkeypatch, tmp_path):
    words = [{words}, "--set", "stop.updates=100", "--out", str(tmp_path / "run"), "--quiet"]
    monkeypatch.setattr(sys, "argv", words)
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code
    assert (tmp_path / "run" / "summary.json").is_file()
"""


def test_its_conformance_its_own_tests_and_its_commands_pass(installed):
    (block,) = blocks(PAGE, "sh")
    commands = [
        shlex.split(line, comments=True) for line in block.text.replace("\\\n", " ").splitlines()
    ]
    assert ["latecomer", "list", "strategies"] in commands
    assert ["python", "-m", "pytest", "tests/test_conformance.py", "-k", NAME] in commands
    (words,) = [words for words in commands if words[:2] == ["latecomer", "run"]]
    own = installed / "test_async_momentum_command.py"
    own.write_text(COMMAND.replace("{words}", ", ".join(map(repr, words))))
    done = python(
        installed,
        *("-m", "pytest", "-q", "-p", "installed", "-p", "no:cacheprovider"),
        *("tests/test_conformance.py", str(installed / "test_async_momentum.py"), str(own)),
        *("-k", f"{NAME} or test_async_momentum"),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    passed = int(done.stdout.rpartition(" passed")[0].split()[-1])
    assert passed >= 18, done.stdout[-500:]
    assert "failed" not in done.stdout
