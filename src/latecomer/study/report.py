"""report.html: a self-contained page of a run or a comparison, from its files alone."""

from pathlib import Path

from latecomer.study.files import write_atomically
from latecomer.study.results import Result, load
from latecomer.study.view.comparison_document import comparison_document
from latecomer.study.view.figures import Format, write_figures
from latecomer.study.view.history import read_history
from latecomer.study.view.page import report_page
from latecomer.study.view.panels import Document
from latecomer.study.view.run_document import run_document


def write_report(folder: Path) -> Path:
    """(Re)write the report of a run or a comparison from its files."""
    page = report_page(document_of(folder))
    path = folder / "report.html"
    write_atomically(path, page)
    return path


def write_pictures(folder: Path, kind: Format) -> Path:
    """One picture for each chart of the report, in DIR/figures."""
    document = document_of(folder)
    write_figures(document, folder / "figures", kind)
    return folder / "figures"


def document_of(folder: Path) -> Document:
    """What there is to show in a folder that `run` or `compare` has written."""
    found = load(folder)
    if isinstance(found, Result):
        return run_document(found, read_history(found.folder / "events.jsonl"))
    return comparison_document(found)
