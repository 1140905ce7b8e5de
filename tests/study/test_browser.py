"""Reports and the live page in a real browser: drawn, legible, accessible, without requests."""

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import everything
from latecomer.study.compare import compare
from latecomer.study.config import Config, Tree, merged
from latecomer.study.report import write_report
from latecomer.study.runner import Silent, start_run
from latecomer.study.view.page import asset, report_page
from latecomer.study.view.panels import Document, Mark, Panel, Series, View

pytestmark = pytest.mark.slow
MakeConfig = Callable[..., Config]
Start = Callable[..., tuple[Path, dict[str, Any]]]
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SIX = ["fedavg", "semi-async", "fedasync", "fedbuff", "weighted", "feddc"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="browser tests need playwright: pip install playwright"
    )
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("browser tests need chromium, e.g. Debian's package of that name")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, address: str | Path, width: int = 1300, scheme: str = "light") -> Any:
    """A page that fails on errors and on requests to other hosts."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    complaints: list[str] = []
    page.on("console", lambda m: complaints.append(m.text) if m.type != "log" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address.as_uri() if isinstance(address, Path) else address)
    yield page
    assert complaints == []
    page.close()


def draw_all(page: Any) -> int:
    """Scrolls through the page, so that every chart is drawn; returns their number."""
    plots = page.query_selector_all(".plot")
    for plot in plots:
        plot.scroll_into_view_if_needed()
        page.wait_for_function("plot => plot.querySelector('.main-svg')", arg=plot)
    return len(plots)


def x_range(page: Any, panel: str) -> list[float]:
    found = page.evaluate(f"document.querySelector('#{panel} .plot').layout.xaxis.range")
    return [float(v) for v in found]


@pytest.fixture(scope="module")
def report(start: Start) -> Path:
    folder, _ = start(
        "evaluate.every=10",
        "fleet.devices=40",
        "stop.updates=400",
        "fleet.profile=phones",
        "fleet.late.classes=[5]",
        "fleet.late.delay=2",
    )
    return write_report(folder)


@pytest.mark.parametrize(("width", "scheme"), [(1300, "light"), (390, "dark")])
def test_a_report_is_drawn(browser: Any, report: Path, width: int, scheme: str) -> None:
    with opened(browser, report, width, scheme) as page:
        assert draw_all(page) >= 6
        empty = page.evaluate(
            "[...document.querySelectorAll('.plot')].filter(p => !p.data.some(t => t.x.length))"
            ".map(p => p.dataset.panel)"
        )
        assert empty == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        requests = page.evaluate("performance.getEntriesByType('resource').map(e => e.name)")
        assert [r for r in requests if not r.startswith(("data:", "blob:"))] == []
        labels = page.eval_on_selector_all(".plot", "all => all.map(p => p.ariaLabel)")
        assert all(len(label) > 20 for label in labels)


def test_a_log_of_everything_is_drawn(browser: Any, tmp_path: Path) -> None:
    path = write_report(everything.make(tmp_path / "all"))
    for width in (1300, 390):
        with opened(browser, path, width) as page:
            assert draw_all(page) == 10
            for choice in page.query_selector_all("section select"):
                for index in range(1, choice.evaluate("s => s.options.length")):
                    choice.select_option(index=index)
            assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_timeline_has_zoom_and_paging(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        draw_all(page)
        before = x_range(page, "timeline")
        page.click("#timeline button[aria-label='Zoom in']")
        page.wait_for_function(
            "low => document.querySelector('#timeline .plot').layout.xaxis.range[0] > low",
            arg=before[0],
        )
        inside = x_range(page, "timeline")
        assert inside[1] - inside[0] == pytest.approx((before[1] - before[0]) / 2, rel=0.01)
        first = page.text_content("#timeline .ytick >> nth=0")
        page.click("#timeline button:has-text('Next')")
        page.wait_for_function(
            "first => document.querySelector('#timeline .ytick').textContent !== first", arg=first
        )
        assert x_range(page, "timeline") == pytest.approx(inside)  # the zoom stays
        box = page.query_selector("#timeline .plot .nsewdrag").bounding_box()
        middle = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + 0.25 * box["width"], middle)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.5 * box["width"], middle, steps=5)
        page.mouse.up()
        page.wait_for_timeout(300)
        dragged = x_range(page, "timeline")
        assert dragged[1] - dragged[0] == pytest.approx((inside[1] - inside[0]) / 4, rel=0.05)
        page.click("#timeline button:has-text('Reset')")
        page.wait_for_timeout(300)
        assert x_range(page, "timeline")[0] == 0


def test_dark_and_light(browser: Any, report: Path) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    ink = "document.querySelector('.plot .xtick text').style.fill"
    with opened(browser, report, scheme="dark") as page:
        draw_all(page)
        assert page.evaluate(paper) == "rgb(18, 22, 27)"
        dark_ink = page.evaluate(ink)
        page.click("button.theme")
        assert page.evaluate(paper) == "rgb(255, 255, 255)"
        page.wait_for_function(f"{ink} !== {json.dumps(dark_ink)}")


def test_a_chart_has_a_table_a_legend_and_keys(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        draw_all(page)
        page.click("#learning summary")
        page.wait_for_selector("#learning tbody tr")
        assert page.locator("#learning tbody tr").count() > 10
        page.click("#timeline summary")
        page.wait_for_selector("#timeline tbody tr")
        assert page.locator("#timeline tbody tr").count() == 25
        legend = page.locator("#learning .legend button")
        assert legend.count() == 4
        legend.nth(1).click()
        assert legend.nth(1).get_attribute("aria-pressed") == "false"
        hidden = "document.querySelector('#learning .plot').data.filter(t => t.visible === false)"
        assert page.evaluate(f"{hidden}.length") == 1
        page.select_option("#learning select", "over client updates")
        assert "client updates" in page.text_content("#learning .plot .xtitle")
        # Everything can be reached by the Tab key, in the order of the page.
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        reached = set()
        for _ in range(120):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.ariaLabel || ''"))
        for name in ("Zoom in", "Save as SVG", "Switch between light and dark", "Next devices"):
            assert name in reached


def test_an_image_is_saved(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        draw_all(page)
        with page.expect_download() as saving:
            page.click("#learning button:has-text('SVG')")
        assert saving.value.suggested_filename == "learning-over-virtual-time.svg"
        assert "<svg" in Path(saving.value.path()).read_text()


@pytest.fixture(scope="module")
def six(tiny_tree: Tree, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = merged(
        tiny_tree, {"stop": {"updates": 80}, "fleet": {"late": {"classes": [5], "delay": 2}}}
    )
    folder = tmp_path_factory.mktemp("six") / "six"
    compare(tree, SIX, [1, 2], folder)
    return write_report(folder)


@pytest.mark.parametrize("width", [1300, 390])
def test_a_comparison_of_six_is_legible(browser: Any, six: Path, width: int) -> None:
    with opened(browser, six, width) as page:
        draw_all(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("#learning .legend button").all_inner_texts() == SIX
        colours = page.evaluate(
            "document.querySelector('#learning .plot').data.filter(t => t.meta !== 'band')"
            ".map(t => t.line.color)"
        )
        assert len(set(colours)) == 6
        for panel in ("outcomes", "classes", "traffic", "learning"):
            assert_apart(page, f"#{panel} .plot .xtick text", panel)


def assert_apart(page: Any, selector: str, what: str) -> None:
    """Labels of the same height do not overlap."""
    boxes = page.eval_on_selector_all(
        selector,
        "all => all.map(t => [t.getAttribute('transform') || '', t.getBoundingClientRect()])"
        ".map(([t, b]) => [/rotate\\(-?[1-9]/.test(t), b.left, b.right])",
    )
    level = sorted((left, right) for turned, left, right in boxes if not turned)
    for (_, right), (left, _) in pairwise(level):
        assert right <= left + 1, what


def test_twenty_curves_leave_room_for_the_chart(browser: Any, tmp_path: Path) -> None:
    lines = [Series(f"strategy number {k}", [0, 1, 2], [0, k, 2 * k]) for k in range(20)]
    marks = [Mark(k / 10, f"split {k}") for k in range(20)]
    view = View("all", "x", "y", lines, marks)
    path = tmp_path / "twenty.html"
    path.write_text(report_page(Document("t", "", {}, [Panel("many", "Many", "", [view])])))
    for width in (1300, 390):
        with opened(browser, path, width) as page:
            draw_all(page)
            assert page.locator(".legend button").count() == 20
            assert page.query_selector(".legend").bounding_box()["height"] <= 140
            assert page.query_selector(".plot .nsewdrag").bounding_box()["height"] > 200
            looks = page.evaluate(
                "document.querySelector('.plot').data.map(t => t.line.color + t.line.dash)"
            )
            assert len(set(looks)) == 20


def test_names_are_never_markup(browser: Any, tmp_path: Path) -> None:
    evil = "<img src=x onerror=document.title='hacked'><b>x</b></script>"
    views = [
        View(evil, evil, evil, [Series(evil, [evil], [1], "bar"), Series("b", ["c"], [1], "bar")]),
    ]
    path = tmp_path / "evil.html"
    document = Document(evil, evil, {evil: evil}, [Panel("p", evil, evil, views)], notes=[evil])
    path.write_text(report_page(document))
    with opened(browser, path) as page:
        draw_all(page)
        assert page.title() == evil
        assert page.locator("img").count() == 0
        assert evil in page.inner_text(".legend")


def test_colours_have_contrast() -> None:
    """Contrast of text and background is at least 4.5 : 1 in both themes (WCAG 2 AA)."""
    blocks = re.findall(r":root[^{]*\{(.*?)\}", asset("page.css"), flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        colour = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block))
        pairs = [("ink", g) for g in ("paper", "card", "wash")]
        pairs += [("soft", g) for g in ("paper", "card", "wash")]
        pairs += [("accent", "paper"), ("accent", "card"), ("accent-ink", "accent")]
        for text, ground in pairs:
            assert contrast(colour[text], colour[ground]) >= 4.5, (text, ground)


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def wait_until(page: Any, what: str, seconds: float = 30.0) -> None:
    """Evaluated by the driver: the page's policy forbids `eval` inside."""
    for _ in range(int(10 * seconds)):
        if page.evaluate(what):
            return
        page.wait_for_timeout(100)
    raise AssertionError(what)


class Gate(Silent):
    """Lets a run continue up to a number of updates and waits there."""

    def __init__(self) -> None:
        self.until, self.open = 120, threading.Event()

    def advanced(self, share: float, updates: int, virtual_seconds: float) -> None:
        if updates >= self.until:
            self.open.wait(60)


def test_the_live_page_grows_with_the_run(browser: Any, tiny: MakeConfig, tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason='the live page needs the extra "watch"')
    uvicorn = pytest.importorskip("uvicorn")
    from latecomer.study.watch.app import listening, live_app

    place = listening("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(live_app(tmp_path), log_level="warning"))
    serving = threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
    serving.start()
    while not server.started:
        time.sleep(0.05)
    gate = Gate()
    config = tiny("stop.updates=300", "evaluate.every=10", "checkpoint.seconds=9999")
    running = threading.Thread(target=start_run, args=(config, tmp_path / "run", gate))
    running.start()
    points = "document.querySelector('#learning .plot').data[0].x.length"
    try:
        with opened(browser, f"http://127.0.0.1:{place.getsockname()[1]}/") as page:
            page.wait_for_selector("#learning .main-svg", timeout=30000)
            wait_until(page, f"{points} >= 12")
            page.click("#learning button[aria-label='Zoom in']")
            page.wait_for_timeout(300)
            zoomed = x_range(page, "learning")
            gate.open.set()
            wait_until(page, f"{points} >= 31")
            assert x_range(page, "learning") == pytest.approx(zoomed)  # the reader's zoom is kept
            wait_until(page, "document.querySelector('.badge').textContent === 'finished'")
            assert page.locator("#device-table tbody tr").count() == 10
            for plot in page.query_selector_all(".plot"):
                plot.scroll_into_view_if_needed()
            wait_until(page, "[...document.querySelectorAll('.plot')].every(p => p.data)")
    finally:
        gate.open.set()
        running.join(60)
        server.should_exit = True
        serving.join(20)
