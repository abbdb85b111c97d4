"""Writes the web page's example from ``examples/``, which an installed package lacks.

``python tools/page_example.py`` rewrites the copy in the package; a test compares both.
"""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPY = ROOT / "src" / "looseleaf" / "server" / "static" / "examples.json"


def page_example() -> str:
    """The documents and the questions without dependent documents, as JSON."""
    examples = ROOT / "examples"
    questions = json.loads((examples / "questions.json").read_text("utf-8"))
    content = {
        "documents": [
            {"title": path.name, "text": path.read_text("utf-8")}
            for path in sorted((examples / "documents").glob("*.txt"))
        ],
        # a chain needs documents that see the documents before them
        "questions": [entry["question"] for entry in questions if entry["task"] != "chain"],
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    COPY.write_text(page_example(), "utf-8")
