"""The page's one-click example, made from ``examples/``: an installed package has no such folder.

``python tools/page_example.py`` rewrites the copy that the page loads; a test holds it current.
"""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPY = ROOT / "src" / "looseleaf" / "server" / "static" / "examples.json"


def page_example() -> str:
    """The documents and those questions that need no document read behind another, as JSON."""
    examples = ROOT / "examples"
    questions = json.loads((examples / "questions.json").read_text("utf-8"))
    content = {
        "documents": [
            {"title": path.name, "text": path.read_text("utf-8")}
            for path in sorted((examples / "documents").glob("*.txt"))
        ],
        # a chain needs a document that read the ones before it, which the page's documents do not
        "questions": [entry["question"] for entry in questions if entry["task"] != "chain"],
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    COPY.write_text(page_example(), "utf-8")
