"""Mutation score per place of the source: the fraction of small changes that its tests detect.

A mutant is the source with one change: another operator or number, a negated condition, min for
max, `and` for `or`, True for False, a deleted statement, a returned None. Docstrings, annotations,
decorators, messages and `__repr__` stay. Each sampled node of the syntax tree yields one mutant.
The tests that execute its lines (measured with `coverage`, to be installed) run fastest first on a
copy of `src` until one fails or exceeds its time limit. Without such a test, a mutant survives.

    python benchmarks/mutation.py core ledger --sample 60 --output result.json
"""

import argparse
import ast
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

STRATEGIES = ["tests/strategies", "tests/test_conformance.py", "tests/engines/test_virtual_grid.py"]
STUDY = [f"tests/study/test_{n}.py" for n in ("evaluate", "run", "metrics", "submodels", "leak")]
PRIVACY = [f"tests/device/test_{n}.py" for n in ("ledger", "privacy", "private_client")]
PLACES = {  # source files, and the tests that belong to them
    "core": ("latecomer/core/*.py", ["tests/core", *STRATEGIES]),
    "strategies": ("latecomer/strategies/**/*.py", STRATEGIES),
    "evaluate": ("latecomer/study/evaluate.py latecomer/study/metrics.py", STUDY),
    "ledger": ("latecomer/device/ledger.py", PRIVACY),
}
MAX_SECONDS = 10.0  # of a test; longer ones are left out
PAIRS = "Lt LtE,Gt GtE,Eq NotEq,Is IsNot,In NotIn,Add Sub,Mult Div,And Or,min max,minimum maximum"
SWAPS = {a: b for pair in PAIRS.split(",") for a, b in (pair.split(), pair.split()[::-1])}
SWAPS |= {"FloorDiv": "Mult", "Mod": "Mult", "Pow": "Mult"}
SKIPPED = {"annotation", "returns", "decorator_list", "exc", "strict", "JoinedStr", "__repr__"}


def changes(node: Any) -> Iterator[tuple[Any, str]]:
    """The mutants at a node: the node to be replaced, and the new text."""
    match node:
        case ast.Compare(ops=[op, *_]) | ast.BinOp(op=op) | ast.BoolOp(op=op):
            if type(op).__name__ in SWAPS:
                new = getattr(ast, SWAPS[type(op).__name__])()
                ops = [new, *getattr(node, "ops", [op])[1:]]
                yield node, f"({ast.unparse(type(node)(**{**vars(node), 'op': new, 'ops': ops}))})"
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield from ((node, repr(n)) for n in {value + 1, value * 2, 0} if n != value)
        case ast.UnaryOp(op=ast.Not()):
            yield node, f"({ast.unparse(node.operand)})"
        case ast.If() | ast.While() | ast.IfExp():
            yield node.test, f"(not ({ast.unparse(node.test)}))"
        case ast.Return(value=ast.expr()) if ast.unparse(node) != "return None":
            yield node, "return None"
        case ast.Call(func=ast.Name() | ast.Attribute()):
            *parts, name = ast.unparse(node.func).split(".")
            if name in SWAPS:
                yield node.func, ".".join([*parts, SWAPS[name]])
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass"
        case ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break() | ast.Delete():
            yield node, "pass"


def sites(path: Path) -> list[list[dict[str, Any]]]:
    """The mutants of a file, one list per node of its syntax tree."""
    found, source = [], path.read_bytes()
    offsets = [0, *accumulate(len(row) for row in source.splitlines(keepends=True))]

    def visit(node: Any, lines: tuple[int, int]) -> None:
        if isinstance(node, ast.FunctionDef):
            lines = node.lineno, node.end_lineno or 0
        elif lines[0] > 1 and isinstance(node, ast.stmt):  # if it has a body, the lines before it
            last = node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno
            lines = node.lineno, max(last, node.lineno)
        found.append([])
        for at, text in changes(node):
            first, last = offsets[at.lineno - 1], offsets[at.end_lineno]
            start, end = first + at.col_offset, offsets[at.end_lineno - 1] + at.end_col_offset
            pair = source[first:last], source[first:start] + text.encode() + source[end:last]
            change = " -> ".join(" ".join(part.decode().split()) for part in pair)
            mutant = {"path": path, "line": at.lineno, "change": change, "span": (start, end)}
            found[-1].append({**mutant, "text": text, "lines": lines})
        for field, value in ast.iter_fields(node):
            for part in value if isinstance(value, list) else [value]:
                name = getattr(part, "arg", getattr(part, "name", ""))
                if isinstance(part, ast.AST) and not {field, name, type(part).__name__} & SKIPPED:
                    visit(part, lines)

    visit(ast.parse(source), (1, len(offsets)))
    return [mutants for mutants in found if mutants]


class Plugin:
    """For pytest: runs the chosen tests, fastest first, with time limits; or all, measured."""

    def __init__(self, chosen: dict[str, float], coverage: Any) -> None:
        self.chosen, self.coverage, self.seconds = chosen, coverage, Counter[str]()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        kept = [item for item in items if self.coverage or item.nodeid in self.chosen]
        items[:] = sorted(kept, key=lambda item: self.chosen.get(item.nodeid, 0.0))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.coverage:
            self.coverage.switch_context(nodeid)
        else:  # processor time and wall time; the signals end the process
            signal.setitimer(signal.ITIMER_PROF, 3 * MAX_SECONDS + 3 * self.chosen[nodeid])
            signal.alarm(int(40 * MAX_SECONDS))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += 1e9 if report.failed else report.duration


def run(src: Path, chosen: dict[str, float], output: Path | None = None) -> bool:
    """Whether the chosen tests pass; or write their seconds and the lines they execute."""
    if pid := os.fork():
        return os.waitpid(pid, 0)[1] == 0
    sys.stdout = sys.stderr = (src.parent / "log").open("w", buffering=1)
    sys.path.insert(0, str(src))
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(src), "HYPOTHESIS_STORAGE_DIRECTORY": f"{src}.{os.getpid()}"}
    files = sorted({name.split("::")[0] for name in chosen})
    arguments = ["-q", "--hypothesis-seed=0", f"--basetemp={src}.files", *files]
    if not output:
        os._exit(pytest.main([*arguments, "-x"], [Plugin(chosen, None)]))
    coverage = __import__("coverage").Coverage(data_file=None, include=[f"{src}/*"])
    plugin = Plugin({}, coverage)
    with coverage.collect():
        pytest.main([*arguments, "-m", "not slow and not soak"], [plugin])
    data = coverage.get_data()
    lines = {os.path.relpath(f, src): data.contexts_by_lineno(f) for f in data.measured_files()}
    output.write_text(json.dumps({"seconds": plugin.seconds, "lines": lines}))
    os._exit(0)


def survives(src: Path, mutant: dict[str, Any], known: Any) -> bool:
    """Whether the tests that execute the mutant's lines pass."""
    path, (start, end), (first, last) = mutant["path"], mutant["span"], mutant["lines"]
    seconds = {test: s for test, s in known["seconds"].items() if s <= MAX_SECONDS}
    lines = known["lines"].get(str(path.relative_to(src)), {})
    names = {test for line in range(first, last + 1) for test in lines.get(str(line), [])}
    names = set(seconds) if first == 1 else names & seconds.keys()  # outside functions: all
    source = path.read_bytes()
    path.write_bytes(source[:start] + mutant["text"].encode() + source[end:])
    passed = not names or run(src, {name: seconds[name] for name in names})
    path.write_bytes(source)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("places", nargs="*", default=list(PLACES), help=f"of {', '.join(PLACES)} (all)")
    add("--root", default=Path(__file__).parents[1], help="folder of src and tests")
    add("--sample", type=int, default=40, help="mutants per place (40)")
    add("--seed", default="0", help="of the sample (0)")
    add("--only", default="", help="only source files whose path ends so")
    add("--survivors", type=Path, help="only the survivors in this result file")
    add("--coverage", type=Path, help="folder where measured tests are kept")
    add("--output", type=Path, default=Path(os.devnull), help="file for the result")
    options, result, folder = parser.parse_args(), {}, tempfile.TemporaryDirectory()
    output, kept = options.output.resolve(), (options.coverage or Path(folder.name)).resolve()
    earlier = options.survivors.read_text() if options.survivors else ""
    for name in ("torch", "pandas", "pydantic", "safetensors", "hypothesis"):
        __import__(name)  # once, instead of in every forked process
    os.chdir(options.root)
    src = Path(shutil.copytree("src", Path(folder.name) / "src"))
    for place in options.places:
        patterns, tests = PLACES[place]
        if not (kept / f"{place}.json").exists():
            run(src, {t: 0.0 for t in tests if Path(t).exists()}, kept / f"{place}.json")
        known = json.loads((kept / f"{place}.json").read_text())
        paths = sorted(path for p in patterns.split() for path in src.glob(p))
        files = [path for path in paths if str(path).endswith(options.only)]
        found = [mutants for file in files for mutants in sites(file)]
        draw = random.Random(options.seed + place)
        mutants = [draw.choice(s) for s in draw.sample(found, min(options.sample, len(found)))]
        if earlier:
            mutants = [m for s in found for m in s if json.dumps(m["change"])[1:-1] in earlier]
        alive = []
        for m in mutants:
            if survives(src, m, known):
                alive.append(f"{m['path'].relative_to(src)}:{m['line']}  {m['change']}")
                print(alive[-1], flush=True)
        print(f"{place}: {len(mutants) - len(alive)} of {len(mutants)} killed\n", flush=True)
        result[place] = {"mutants": len(mutants), "survivors": alive}
        output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
