"""report.html as one file: page, data and chart library; it makes no network requests."""

import html
import json
from functools import cache
from importlib.resources import files
from typing import Any

from latecomer.study.view.panels import Document, to_json

SCRIPTS = ("plotly-basic.min.js", "lanes.js", "charts.js", "page.js")
# Inline scripts and styles only: the report can neither load nor send anything.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';"
    " img-src data: blob:; base-uri 'none'; form-action 'none'"
)


@cache
def asset(name: str) -> str:
    """The text of a file in assets/."""
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def report_page(document: Document) -> str:
    """The document as one self-contained HTML page."""
    data = to_json(document)
    scripts = "\n".join(f"<script>{asset(name)}</script>" for name in SCRIPTS)
    facts = "".join(f"<li>{html.escape(n)}: {html.escape(v)}</li>" for n, v in data["facts"])
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(data["title"])}</title>
<style>{asset("page.css")}</style></head><body>
<div id="app"><h1>{html.escape(data["title"])}</h1></div>
<noscript><p>The charts need JavaScript.</p><ul>{facts}</ul></noscript>
<script type="application/json" id="document">{script_json(data)}</script>
{scripts}
<script>Latecomer.showReport();</script>
</body></html>
"""


def script_json(value: Any) -> str:
    """JSON that can stand in a `<script>`: `<` and line separators are escaped."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
