"""A hook of the site: adds pages from outside of docs/, and rewrites links that leave docs/.

Links work unchanged on a forge. On the site, a link to a file with a page leads to that page. A
link to another file becomes its path.
"""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ELSEWHERE = {
    "src/looseleaf/assets/MODEL_CARD.md": "model-card.md",
    "training/NOTES.md": "training-notes.md",
    "CHANGELOG.md": "changelog.md",
}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of `ELSEWHERE` and the page of options."""
    from mkdocs.structure.files import File

    for source, page in ELSEWHERE.items():
        text = rewrite((ROOT / source).read_text("utf-8"), source, page)
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "reference/options.md", content=options_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page of docs/."""
    name = page.file.src_uri
    return markdown if name in ELSEWHERE.values() else rewrite(markdown, f"docs/{name}", name)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Prevent line breaks between a number and its unit, and inside names of options."""
    return "".join(
        block if block.startswith("<pre") else _keep_whole(block)
        for block in re.split(r"(<pre.*?</pre>)", html, flags=re.DOTALL)
    )


def _keep_whole(html: str) -> str:
    joined = "".join(
        part if part.startswith("<") else re.sub(r"(\d) (×|%)", "\\1\N{NO-BREAK SPACE}\\2", part)
        for part in re.split(r"(<[^>]*>)", html)
    )

    def options(match: re.Match[str]) -> str:
        kept = re.sub(r"(?<![\w-])(--?[a-z][\w-]*)", r'<span class="option">\1</span>', match[1])
        return f"<code>{kept}</code>"

    return re.sub(r"<code>([^<]*)</code>", options, joined)


def rewrite(text: str, source: str, page: str) -> str:
    """``text`` of the file ``source`` with links rewritten for the site's page ``page``."""

    def replacement(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        if path in ELSEWHERE:
            shown = ELSEWHERE[path]
        elif path.startswith("docs/"):
            shown = path.removeprefix("docs/")
        else:
            # the label may contain the path
            return f"`{path}`" if label.strip("`") in path else f"{label} (`{path}`)"
        return f"[{label}]({os.path.relpath(shown, os.path.dirname(page) or '.')}{anchor})"

    return _LINK.sub(replacement, text)


def options_page() -> str:
    """The page of all options with defaults and help, from the dataclasses."""
    from looseleaf.config import (
        CacheConfig,
        EngineConfig,
        SchedulerConfig,
        ServerConfig,
        TierConfig,
    )

    sections = {
        "Engine": EngineConfig,
        "Cache": CacheConfig,
        "Scheduler": SchedulerConfig,
        "Tiers": TierConfig,
        "Server": ServerConfig,
    }
    lines = [
        "# Options",
        "",
        "Fields of the configuration. In Python they are arguments of `LLM` and `AsyncLLM`, on the",
        "command line flags with dashes, for `looseleaf serve` also variables `LOOSELEAF_NAME` and",
        "names in the file of `--config`.",
    ]
    for title, section in sections.items():
        lines += ["", f"## {title}", "", "| option | default | meaning |", "|---|---|---|"]
        for field in dataclasses.fields(section):
            if "help" in field.metadata:
                meaning = field.metadata["help"].replace("|", "\\|").replace("{", "&#123;")
                lines.append(f"| `{field.name}` | `{field.default!r}` | {meaning} |")
    return "\n".join(lines) + "\n"
