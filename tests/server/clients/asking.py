"""What the client suites ask: the example documents and questions with their right answers."""

import json
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"

DOCUMENTS = [
    {"title": path.name, "text": path.read_text("utf-8")}
    for path in sorted((EXAMPLES / "documents").glob("*.txt"))
]

# a chain needs a document that read the ones before it, which documents of a request do not
ANSWERS = {
    entry["question"]: entry["answer"]
    for entry in json.loads((EXAMPLES / "questions.json").read_text("utf-8"))
    if entry["task"] != "chain"
}


def with_documents(client, question, documents=DOCUMENTS):
    """Arguments of a chat completion that asks the first model about documents."""
    return {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": question}],
        "extra_body": {"documents": documents},
    }
