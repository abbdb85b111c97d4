"""LlamaIndex's OpenAILike against `looseleaf serve`: nodes go along as documents, not as text.

It needs `pip install llama-index-llms-openai-like`.
Start `looseleaf serve` first, after `. .venv/bin/activate`.
OPENAI_BASE_URL and OPENAI_API_KEY say where it is and who asks.
"""

import os
from pathlib import Path

from llama_index.core.llms import ChatMessage
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.openai_like import OpenAILike

FOLDER = Path(__file__).parent / "documents"
QUESTION = "Where is the archive?"


def retrieve() -> list[NodeWithScore]:
    """All example documents; in an application, what its retriever returns."""
    nodes = [
        TextNode(text=path.read_text(encoding="utf-8"), metadata={"file_name": path.name})
        for path in sorted(FOLDER.glob("*.txt"))
    ]
    return [NodeWithScore(node=node, score=1.0) for node in nodes]


def main() -> None:
    """Answers from the nodes, then the same as a stream, with the nodes turned round."""
    llm = OpenAILike(
        model=os.environ.get("OPENAI_MODEL", "looseleaf-reference"),
        api_base=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        is_chat_model=True,
        temperature=0,
    )
    found = [{"title": n.metadata["file_name"], "text": n.text} for n in retrieve()]
    messages = [ChatMessage(role="user", content=QUESTION)]

    answer = llm.chat(messages, extra_body={"documents": found})
    print(answer.message.content)
    for entry in answer.raw.looseleaf["documents"]:
        print(f"  {entry['title']}: {entry['tokens']} tokens, {entry['source']}")

    for chunk in llm.stream_chat(messages, extra_body={"documents": found[::-1]}):
        print(chunk.delta or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
