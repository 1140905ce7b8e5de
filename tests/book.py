"""The docs as data: pages, their blocks of code, headings and links."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

FENCE = re.compile(r"^ *```(\w*)")
EXEMPT = re.compile(r"<!-- not run: (.+) -->")
LINK = re.compile(r"\]\(([^()\s]+)\)")
NAMED = re.compile(r"^# ([\w.-]+\.(?:py|toml))\n")


@dataclass(frozen=True)
class Block:
    """A fenced block; `exempt` is why it is not run, `file` the name that its first line gives."""

    page: Path
    line: int
    language: str
    text: str
    exempt: str

    @property
    def file(self) -> str:
        named = NAMED.match(self.text)
        return named[1] if named else ""

    def __str__(self) -> str:
        return f"{name(self.page)}:{self.line}"


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[Block]:
    """The page's blocks in order; without languages all of them."""
    found, opened, before = [], None, ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if opened is None and fence:
            reason = EXEMPT.fullmatch(before.strip())
            opened, body = (number, fence[1], reason[1] if reason else ""), []
        elif opened is not None and fence:
            start, language, exempt = opened
            found.append(Block(page, start, language, "\n".join(body) + "\n", exempt))
            opened = None
        elif opened is not None:
            body.append(line)
        if line.strip():
            before = line
    assert opened is None, f"{name(page)}: a block is not closed"
    return [each for each in found if not languages or each.language in languages]


def prose(page: Path) -> str:
    """The page without its blocks."""
    lines, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        if FENCE.match(line):
            inside = not inside
        elif not inside:
            lines.append(line)
    return "\n".join(lines)


def anchors(page: Path) -> set[str]:
    """The fragments of its headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE):
        words = LINK.sub("", heading).lower()
        slug = "".join(c for c in words if c.isalnum() or c in " -_").replace(" ", "-")
        same = sum(each == slug or re.fullmatch(rf"{slug}-\d+", each) is not None for each in found)
        found.add(f"{slug}-{same}" if same else slug)
    return found


def links(page: Path) -> list[tuple[Path, str]]:
    """Where its relative links lead: a file, and a fragment or nothing."""
    found = []
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        found.append(((page.parent / path).resolve() if path else page, fragment))
    return found
