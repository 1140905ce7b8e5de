"""Writes report.html or image files of a run or a comparison from the files in its folder."""

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
    """Writes DIR/report.html; returns its path."""
    path = folder / "report.html"
    write_atomically(path, report_page(document_of(folder)))
    return path


def write_pictures(folder: Path, kind: Format) -> Path:
    """Writes one image file per chart of the report into DIR/figures; returns that folder."""
    write_figures(document_of(folder), folder / "figures", kind)
    return folder / "figures"


def document_of(folder: Path) -> Document:
    """The document of a folder that `run` or `compare` has written."""
    found = load(folder)
    if isinstance(found, Result):
        return run_document(found, read_history(found.folder / "events.jsonl"))
    return comparison_document(found)
