"""Turns run folders into tables, figures and one HTML page. Nothing but run folders is read."""

from __future__ import annotations

from eepo.reports.measures import comparison_rows
from eepo.reports.page import report_page, write_report
from eepo.reports.records import Run, by_method, read_run, read_runs, run_folders
from eepo.reports.summary import summary_sentences
from eepo.reports.tables import html_table, markdown_table, terminal_table

__all__ = [
    "Run",
    "by_method",
    "comparison_rows",
    "html_table",
    "markdown_table",
    "read_run",
    "read_runs",
    "report_page",
    "run_folders",
    "summary_sentences",
    "terminal_table",
    "write_report",
]
