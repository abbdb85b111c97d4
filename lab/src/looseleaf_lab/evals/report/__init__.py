"""Tables, plots and one static page from the rows in ``results/``, without a model."""

from looseleaf_lab.evals.report.page import write_report

__all__ = ["write_report"]
