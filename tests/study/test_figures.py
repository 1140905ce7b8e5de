"""Image files: every view is drawn, and the same data give the same file."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

import everything
from latecomer.errors import BadInput
from latecomer.study.report import document_of, write_pictures
from latecomer.study.view import figures
from latecomer.study.view.figures import write_figures
from latecomer.study.view.panels import Document, Panel, Series, View

AGAIN = ("learning", "clusters", "devices")  # panels that are drawn twice


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return everything.make(tmp_path_factory.mktemp("figures") / "all")


@pytest.fixture
def _matplotlib() -> None:
    pytest.importorskip("matplotlib", reason='pictures need the extra "figures"')


def test_a_log_of_everything_has_all_panels(folder: Path) -> None:
    document = document_of(folder)
    assert [panel.id for panel in document.panels] == [
        "learning",
        "classes",
        "timeline",
        "staleness",
        "compensation",
        "clusters",
        "privacy",
        "traffic",
        "widths",
        "devices",
    ]
    columns = document.tables[0].columns
    shown = {"late", "state", "epsilon", "budget left", "width", "cluster", "local test accuracy"}
    assert shown <= set(columns)
    assert "offline" in columns["state"]


@pytest.mark.usefixtures("_matplotlib")
def test_every_view_is_an_image(folder: Path, tmp_path: Path) -> None:
    made = write_pictures(folder, "svg")
    assert made == folder / "figures"
    views = [(p.id, v.name) for p in document_of(folder).panels for v in p.views]
    files = sorted(made.glob("*.svg"))
    assert len(files) == len(views)
    for path in files:
        assert ET.parse(path).getroot().tag.endswith("svg")
        assert path.stat().st_size < 400_000
    clusters = (made / "clusters-members.svg").read_text()
    assert "split main, c1" in clusters
    some = Document("", "", {}, [p for p in document_of(folder).panels if p.id in AGAIN])
    for path in write_figures(some, tmp_path, "svg"):
        assert path.read_bytes() == (made / path.name).read_bytes()


@pytest.mark.usefixtures("_matplotlib")
def test_png_for_slides(folder: Path, tmp_path: Path) -> None:
    document = document_of(folder)
    small = Document("", "", {}, document.panels[:2])
    for path in write_figures(small, tmp_path, "png"):
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size < 200_000


@pytest.mark.usefixtures("_matplotlib")
def test_odd_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    names = ["_hidden", "a $x_1$ b", "<b>&", "ü ± 3"]
    view = View("../odd", "x", "y", [Series(name, [0, 1], [0, 1]) for name in names])
    bars = View("bars", "x", "y", [Series("s", names, [1, 2, None, 4], "bar")])
    panel = Panel("p", "t$", "", [view, bars])
    first, second = write_figures(Document("", "", {}, [panel]), tmp_path, "svg")
    assert first == tmp_path / "p-..-odd.svg"
    assert second.parent == tmp_path
    text = re.sub(r"<[^>]*>", "", first.read_text())
    for name in ("_hidden", "a $x_1$ b", "&lt;b&gt;&amp;", "ü ± 3"):
        assert name in text


def test_without_matplotlib_it_is_one_line(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r'pip install "latecomer\[figures\]"'):
        write_figures(Document("", "", {}, []), tmp_path / "figures", "png")
    assert not (tmp_path / "figures").exists()
