"""Tables, plots and one static page from the rows in ``results/``; runs no model."""

from looseleaf_lab.evals.report.page import write_report

__all__ = ["write_report"]
