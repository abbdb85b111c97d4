"""What the site's hook makes of a page."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def site() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "site.py"
    spec = importlib.util.spec_from_file_location("site_hook", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_number_stays_with_its_unit_and_an_option_whole(site: ModuleType) -> None:
    html = '<p title="3 %">3 % of <code>a --fuse-by x</code></p><pre><code>4 % --b</code></pre>'
    kept = site.on_page_content(html, None, None, None)
    assert kept == (
        '<p title="3 %">3\N{NO-BREAK SPACE}% of <code>a <span class="option">--fuse-by</span> x'
        "</code></p><pre><code>4 % --b</code></pre>"
    )


def test_links_that_leave_the_docs_show_a_path(site: ModuleType) -> None:
    text = "[card](../src/looseleaf/assets/MODEL_CARD.md) [rows](../results/hits.csv)"
    assert site.rewrite(text, "docs/claims.md", "claims.md") == (
        "[card](model-card.md) rows (`results/hits.csv`)"
    )
