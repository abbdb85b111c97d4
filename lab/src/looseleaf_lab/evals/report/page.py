"""The report: a file per plot, all tables in Markdown, and one page with everything."""

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from looseleaf.errors import InvalidOption
from looseleaf_lab.evals.report.charts import Chart, Format, draw
from looseleaf_lab.evals.report.quality import budget_charts, quality_charts, quality_table
from looseleaf_lab.evals.report.reading import reading_charts, reading_tables
from looseleaf_lab.evals.report.rows import Row, origin_of, read_rows
from looseleaf_lab.evals.report.sharing import hits_charts, lazy_charts, rate_charts, relay_charts
from looseleaf_lab.evals.report.speed import (
    attention_tables,
    frames_charts,
    fuse_charts,
    hosted_charts,
    select_charts,
    serving_tables,
    tiers_charts,
)
from looseleaf_lab.evals.report.tables import Table

_CHARTS: Mapping[str, tuple[str, Callable[[Sequence[Row]], Iterable[Chart]]]] = MappingProxyType(
    {
        "evals": ("Share of right answers", quality_charts),
        "roll_call": ("Keys read by a roll-call", reading_charts),
        "interview": ("Keys read by an interview", reading_charts),
        "blend": ("Quality by recomputed share", budget_charts),
        "hits": ("Hit ratios of a cache", hits_charts),
        "relay": ("A prefix that all requests share", relay_charts),
        "lazy": ("Documents stored once", lazy_charts),
        "rate": ("First tokens while requests arrive", rate_charts),
        "fuse": ("First tokens by recomputed tokens", fuse_charts),
        "tiers": ("First tokens by storage tier", tiers_charts),
        "select": ("Decoding with selection", select_charts),
        "attention": ("Attention and its roofline", frames_charts),
        "hosted": ("Documents in host memory", hosted_charts),
        "serving": ("A server and its floors", lambda rows: ()),
    }
)
_TABLES: Mapping[str, Callable[[Sequence[Row]], Sequence[Table]]] = MappingProxyType(
    {
        "evals": lambda rows: [quality_table(rows)],
        "roll_call": lambda rows: list(reading_tables(rows)),
        "interview": lambda rows: list(reading_tables(rows)),
        "attention": lambda rows: list(attention_tables(rows)),
        "serving": lambda rows: list(serving_tables(rows)),
    }
)
# results that do not depend on the machine: accuracies and counts
_OF_ANY_MACHINE = frozenset(("evals", "roll_call", "interview", "blend", "hits"))
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem }
body { color: #1a202c }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto }
td, th { border-bottom: 1px solid #e2e8f0; padding: .25rem .6rem; text-align: left }
svg { max-width: 100%; height: auto }
p.origin { color: #4a5568; font-size: 13px }
"""


def write_report(results: Path, output: Path, kind: Format = "svg") -> list[Path]:
    """Draw the results of the folder ``results`` into the folder ``output``; returns the files.

    Raises InvalidOption if there are no results."""
    sections, written = [], []
    tables: list[Table] = []
    output.mkdir(parents=True, exist_ok=True)
    for name, (title, charts_of) in _CHARTS.items():
        path = results / f"{name}.csv"
        if not path.is_file():
            continue
        rows = read_rows(path, per_machine=name not in _OF_ANY_MACHINE)
        parts = [f"<h2>{html.escape(title)}</h2>"]
        for chart in charts_of(rows):
            picture = output / f"{chart.name}.{kind}"
            picture.write_bytes(draw(chart, kind))
            written.append(picture)
            svg = draw(chart, "svg").decode()
            parts.append(svg[svg.index("<svg") :])
        section_tables = _TABLES[name](rows) if name in _TABLES else ()
        parts += [table.html() for table in section_tables]
        tables += section_tables
        parts.append(f'<p class="origin">{html.escape(origin_of(rows))}.</p>')
        sections.append("\n".join(parts))
    if not sections:
        raise InvalidOption(
            f"{results} has none of {', '.join(f'{name}.csv' for name in _CHARTS)}: run looseleaf "
            "eval or looseleaf bench first, or name another folder with --results"
        )
    page = output / "index.html"
    page.write_text(_page(sections), encoding="utf-8")
    markdown = output / "tables.md"
    markdown.write_text("\n".join(table.markdown() for table in tables), encoding="utf-8")
    return [page, markdown, *written]


def _page(sections: Sequence[str]) -> str:
    body = "\n".join(sections)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>Looseleaf: figures</title><style>{_STYLE}</style>'
        f"</head><body><h1>Looseleaf: figures</h1>\n{body}\n</body></html>\n"
    )
