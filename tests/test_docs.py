"""Every example in the docs runs or is checked, and every link leads somewhere."""

import importlib.util
import re
import shlex
import sys
import tomllib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import typer

from book import PAGES, ROOT, Block, anchors, blocks, links, name, prose
from latecomer import cli
from latecomer.strategies import recipe as registry
from latecomer.strategies.recipe import find_recipe, recipes, resolve_options
from latecomer.study.compare import cells
from latecomer.study.config import Config, parse, quickstart, read_toml, with_settings
from latecomer.study.experiment import Experiment

# Blocks with `<!-- not run: reason -->` before them. There is a better way than a larger number.
MOST_EXEMPT = 2
# Pages whose commands are all run, from top to bottom; elsewhere `list` and `check` are, and what
# uses the page's own files.
WHOLE = {"docs/quickstart.md", "docs/data.md", "docs/fleets.md", "docs/api.md"}
MODULE = re.compile(r"^(strategy|model)\.name=|:\w+$")  # strategy.name=MODULE:callable
FEW = 60  # updates of a run there
# Of these pages Python is compiled and commands are parsed: they need a federation of real nodes.
DEPLOYED = {"docs/deploy.md", "docs/flower.md", "docs/reliability.md"}
# Run by tests/test_adding_a_paper.py: it must stand in the package.
ADDED = "docs/adding-a-paper.md"
# Tables at the top of TOML that is no config of ours: pyproject, and Flower's own.
OTHER_TOML = {"superlink", "project", "tool", "build-system"}
MOST_OTHER_TOML = 3
FILES = {"csv", "json", "jsonl", "md", "py", "safetensors", "toml"}  # endings of what is no key
# Programs beside ours whose lines are taken as they are.
OTHERS = {"pip", "export", "tensorboard", "mlflow", "flwr", "git", "cd"}
by_page = pytest.mark.parametrize("page", PAGES, ids=name)


# Links


@by_page
def test_links_and_anchors_lead_somewhere(page):
    for path, fragment in links(page):
        assert path.exists(), f"{name(page)} links to {path}"
        if fragment:
            assert fragment in anchors(path), f"{name(page)}: no #{fragment} in {path.name}"


def test_what_the_program_points_at_is_there():
    """Advice, messages and docstrings name pages and sections."""
    seen = 0
    for source in sorted((ROOT / "src").rglob("*.py")):
        for path, fragment in re.findall(r"(docs/[\w/-]+\.md)(?:#([\w-]+))?", source.read_text()):
            assert (ROOT / path).is_file(), f"{source.name}: {path}"
            assert not fragment or fragment in anchors(ROOT / path), f"{source.name}: {fragment}"
            seen += 1
    assert seen > 10


def test_the_tests_that_pages_name_are_there():
    written = "".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))
    there = set(re.findall(r"^ *def (test_\w+)", written, re.M))
    for page in PAGES:
        named = set(re.findall(r"`(test_\w+)`", prose(page)))
        assert named <= there, f"{name(page)}: {named - there}"


def test_every_page_can_be_reached_from_the_first():
    reached, ahead = set(), [ROOT / "docs/README.md"]
    while ahead:
        page = ahead.pop()
        if page.suffix == ".md" and page.exists() and page not in reached:
            reached.add(page)
            ahead += [path for path, _ in links(page)]
    assert set(PAGES) - {ROOT / "README.md"} <= reached
    assert ROOT / "docs/README.md" in {path for path, _ in links(ROOT / "README.md")}


# What counts


def test_few_blocks_are_exempt():
    exempt = [each for page in PAGES for each in blocks(page) if each.exempt]
    assert len(exempt) <= MOST_EXEMPT, [str(each) for each in exempt]
    comments = sum(prose(page).count("\n<!-- not run") for page in PAGES)
    assert comments == len(exempt), "a comment stands before no block, or gives no reason"


def test_little_toml_is_not_ours():
    other = [each for page in PAGES for each in blocks(page, "toml") if not is_config(each)]
    assert len(other) <= MOST_OTHER_TOML, [str(each) for each in other]


@by_page
def test_blocks_say_what_they_are(page):
    """A command in a block without a language would not be looked at."""
    if name(page) in DEPLOYED:
        return
    for block in blocks(page, "", "bash", "shell", "py"):
        assert not re.search(r"^(import|from|make|latecomer|pip|\[\w+\]) ?", block.text, re.M), (
            f"{block}: needs its language"
        )


# TOML


def is_config(block: Block) -> bool:
    return not set(tomllib.loads(block.text)) & OTHER_TOML


def checked(tree: dict, own: Collection[str] = (), more: Sequence[str] = ()) -> None:
    """What can be said of a config without its data: keys, values, strategies and options.

    A strategy of the page's `own` is not there yet; `more` are to be compared.
    """
    labels = [*more, parse(tree).strategy.name, *tree.get("compare", {})]
    for cell in cells(tree, labels, [1]):
        strategy = cell.config().strategy
        if ":" not in strategy.name and strategy.name not in own:
            resolve_options(find_recipe(strategy.name), strategy.model_extra or {})


@by_page
def test_configs_are_right(page):
    for block in blocks(page, "toml"):
        if not block.exempt and is_config(block):
            tree = tomllib.loads(block.text)
            checked(tree)
            config = parse(tree)
            if config.data.source == "digits" and not config.fleet.path:
                Experiment(config)


# Commands


def lines(block: Block) -> Iterator[list[str]]:
    """The words of each command. In a transcript these are the lines with a prompt."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.language == "console" and not line.startswith("$ "):
            continue
        if words := shlex.split(line.removeprefix("$ "), comments=True):
            yield words


def is_ours(words: list[str]) -> bool:
    return Path(words[0]).name == "latecomer"


def is_synopsis(words: list[str]) -> bool:
    return any(word.startswith("[") or word == "..." for word in words)


def understood(words: list[str]) -> tuple[str, dict]:
    """The command's name and parameters as the command line reads them; nothing is run."""
    command = typer.main.get_command(cli.app)
    context, rest, path = command.make_context("latecomer", []), words[1:], []
    while hasattr(command, "commands"):
        called, command, rest = command.resolve_command(context, rest)
        path.append(called)
        context = command.make_context(called, list(rest), parent=context)
    return " ".join(path), context.params


def files_of(page: Path) -> dict[str, str]:
    """The files that the page's blocks make by giving their name."""
    return {each.file: each.text for each in blocks(page, "toml", "python") if each.file}


def registered_on(page: Path) -> set[str]:
    return set(re.findall(r'@recipe\(\s*"([\w-]+)"', page.read_text(encoding="utf-8")))


def check_command(words: list[str], page: Path, with_files: bool) -> None:
    command, given = understood(words)
    strategies = [each for each in (given.get("strategies") or "").split(",") if each]
    for each in strategies if not with_files else []:
        assert ":" in each or each in recipes(), each
    if command == "list":
        assert given["what"] in {"strategies", "datasets", "models", "fleets"}
    if not with_files or command not in {"run", "compare", "check", "advise", "study har"}:
        return
    path = Path(given.get("config") or given.get("what") or "")
    if given.get("resume") or (path.name and not path.suffix):
        return  # a folder that an earlier command has made
    if not path.name:
        tree = quickstart()
    elif path.name in files_of(page):
        tree = tomllib.loads(files_of(page)[path.name])
    else:
        tree = read_toml(ROOT / path)
    tree = with_settings(tree, given.get("settings") or [])
    checked(tree, registered_on(page), strategies)


def check_line(words: list[str], page: Path) -> None:
    program = Path(words[0]).name
    if program == "latecomer":
        check_command(words, page, with_files=name(page) not in DEPLOYED)
    elif program.startswith("python"):
        script = words[2:3] if words[1] == "-m" else words[1:2]
        assert words[1] == "-m" or (ROOT / script[0]).is_file(), script
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(words[1:]) <= set(targets)
    else:
        assert program in OTHERS, f"a program that the tests do not know: {program}"


@by_page
def test_commands_are_understood(page):
    for block in blocks(page):
        plain = block.language in {"", "text"} or name(page) in DEPLOYED
        if block.exempt or not (plain or block.language in {"sh", "console"}):
            continue
        if plain and not re.search(r"^(\$ )?latecomer ", block.text, re.M):
            continue
        for words in lines(block):
            if is_synopsis(words) or (plain and not is_ours(words)):
                continue
            try:
                check_line(words, page)
            except (Exception, SystemExit) as error:
                pytest.fail(f"{block}: {shlex.join(words)}: {error}")


@pytest.mark.parametrize("page", [each for each in PAGES if name(each) not in DEPLOYED], ids=name)
def test_commands_named_in_the_text_exist(page):
    for span in re.findall(r"`latecomer ([^`]+)`", prose(page)):
        command, words = typer.main.get_command(cli.app), span.replace("[", " ").split()
        while hasattr(command, "commands") and words and words[0].isalpha():
            assert words[0] in command.commands, f"{name(page)}: latecomer {span}"
            command, words = command.commands[words[0]], words[1:]
        known = {option for each in command.params for option in each.opts}
        used = {word.strip("].,") for word in words if word.startswith("--")}
        assert used <= known | {"--version"}, f"{name(page)}: latecomer {span}"


@by_page
def test_keys_named_in_the_text_exist(page):
    """`table.key` in code font is a key of the config, an option, or a name of the package."""
    options = {each for found in recipes().values() for each in found.options}
    for span in re.findall(r"`((?:[a-z_]+\.)+[a-z_]+)(?: = [^`]*)?`", prose(page)):
        table, *keys = span.split(".")
        if table not in Config.model_fields or keys[-1] in FILES:
            continue
        if table == "strategy" and keys[0] in {"name", *options}:
            continue
        found, here = Config.model_fields[table].annotation, True
        for key in keys:
            here = key in getattr(found, "model_fields", {})
            found = found.model_fields[key].annotation if here else None
        file = ROOT / "src/latecomer" / table / f"{keys[0]}.py"
        assert here or file.is_file(), f"{name(page)}: {span}"


# Running


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a page is run: with the repository's examples, and data that a reader would have."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LATECOMER_STATE", str(tmp_path / "devices"))
    monkeypatch.setattr(registry, "_REGISTERED", dict(recipes()))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    y = np.arange(60) % 3
    x = np.random.default_rng(0).normal(size=(60, 8)) + y[:, None]
    np.savez(tmp_path / "har.npz", x=x, y=y, subject=np.arange(60) // 10)
    before = set(sys.modules)
    yield tmp_path
    for module in set(sys.modules) - before:
        if Path(getattr(sys.modules[module], "__file__", None) or "/").parent == tmp_path:
            del sys.modules[module]


def shortened(words: list[str]) -> list[str]:
    """The same with one seed, one job and few updates, if it is about to train."""
    if words[1] not in {"run", "compare"} or "--resume" in words:
        return words
    single = ["--seeds", "1", "--jobs", "1"] if words[1] == "compare" else []
    return [*words, *single, "--set", f"stop.updates={FEW}"]


def run(words: list[str], monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["latecomer", *words[1:]])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code, shlex.join(words)


def is_run(words: list[str], page: Path) -> bool:
    if not is_ours(words) or name(page) in DEPLOYED:
        return False
    made = files_of(page)
    uses = any(word in made or f"{MODULE.sub('', word)}.py" in made for word in words)
    trains = words[1] in {"run", "compare", "advise"}
    return name(page) in WHOLE or words[1] in {"list", "check"} or (trains and uses)


RUN = [page for page in PAGES if blocks(page, "python", "sh") and name(page) != ADDED]


@pytest.mark.parametrize("page", RUN, ids=name)
def test_examples_run(page, folder, monkeypatch, capfd):
    variables = {"__name__": "example"}
    for block in blocks(page, "python", "toml", "sh"):
        if block.exempt:
            continue
        if block.file:
            (folder / block.file).write_text(block.text)
        if block.language == "python":
            if "flwr" in block.text and importlib.util.find_spec("flwr") is None:
                continue
            code = compile(block.text, str(block), "exec")
            if name(page) not in DEPLOYED:
                exec(code, variables)
        elif block.language == "sh":
            for words in lines(block):
                if is_run(words, page):
                    run(shortened(words), monkeypatch)
    capfd.readouterr()


def test_many_are_run():
    """The rest is parsed: it takes minutes, or data that are not here."""
    commands = [
        (words, page) for page in PAGES for block in blocks(page, "sh") for words in lines(block)
    ]
    assert sum(is_run(words, page) for words, page in commands) >= 20
    examples = sum(len(blocks(page, "python")) for page in PAGES if name(page) not in DEPLOYED)
    assert examples - MOST_EXEMPT >= 15


@pytest.mark.parametrize(
    "block",
    [each for page in PAGES for each in blocks(page, "console") if "\n...\n" not in each.text],
    ids=str,
)
def test_transcripts_are_true(block, folder, monkeypatch, capfd):
    """A transcript that is given in full is what the command prints."""
    (words,) = lines(block)
    run(words, monkeypatch)
    assert capfd.readouterr().out == block.text.partition("\n")[2]


# The helpers


def test_a_page_is_read_as_it_is_meant(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "# One `[two]`: three\n\n<!-- not run: why -->\n```sh\n# no heading\nlatecomer run \\\n"
        "  --set a=1  # why\n```\n[a](b.md#c) [d](https://x.org)\n## One\n## One\n"
    )
    (block,) = blocks(page)
    assert (block.language, block.exempt, block.line) == ("sh", "why", 4)
    assert list(lines(block)) == [["latecomer", "run", "--set", "a=1"]]
    assert anchors(page) == {"one-two-three", "one", "one-1"}
    assert links(page) == [(tmp_path / "b.md", "c")]
    assert "no heading" not in prose(page)


@pytest.mark.parametrize(
    "line",
    [
        "latecomer rum",
        "latecomer run --sed 3",
        "latecomer run nowhere.toml",
        "latecomer run --set training.rate=1",
        "latecomer run --set strategy.name=fedsync",
        "latecomer compare examples/tiers.toml --strategies fedbuff,nobody",
        "latecomer list cakes",
        "python benchmarks/nothing.py",
        "make cake",
        "rm -rf everything",
    ],
)
def test_a_wrong_line_is_found(line):
    with pytest.raises((Exception, SystemExit)):
        check_line(shlex.split(line), ROOT / "README.md")
