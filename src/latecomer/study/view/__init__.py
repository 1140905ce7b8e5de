"""Charts and tables of a run or a comparison, for report.html, the live page and image files."""
