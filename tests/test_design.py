"""docs/design.md describes the code as it is: the names it mentions exist, and none is missing."""

import re
from pathlib import Path
from typing import get_args

from book import ROOT
from latecomer.core import messages, outcomes
from latecomer.core.parts import HOOKS, SLOTS

PAGE = (ROOT / "docs/design.md").read_text(encoding="utf-8")
SPANS = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.S)))
# Words of spans that are no names of the code: a standard library, endings of files, a flag.
OTHER = {"functools", "partial", "json", "svg", "jsonl", "resume", "html"}


def sources(*endings: str) -> list[str]:
    found = (path for folder in ("src", "tests") for path in (ROOT / folder).rglob("*"))
    return [str(path) for path in sorted(found) if path.suffix in endings]


def test_every_name_exists():
    code = [path for path in sources(".py", ".js") if "/src/" in path]
    words = {*OTHER}
    for path in code:
        words |= set(re.findall(r"\w+", Path(path).read_text(encoding="utf-8")))
    for span in SPANS:
        if re.fullmatch(r"[\w/]+\.py", span):
            assert any(path.endswith("/" + span) for path in sources(".py")), span
        elif not span.startswith("test_"):  # tests/test_docs.py looks for these
            unknown = [word for word in re.findall(r"[A-Za-z_]\w{2,}", span) if word not in words]
            assert not unknown, f"{span}: {unknown}"


def test_every_event_command_outcome_and_hook_is_described():
    named = set(re.findall(r"\w+", " ".join(SPANS)))
    kinds = {*get_args(messages.Event), *get_args(messages.Command)}
    kinds |= set(outcomes.Outcome.__subclasses__())
    wanted = {kind.__name__ for kind in kinds} | {*HOOKS, *SLOTS}
    assert wanted <= named, wanted - named
