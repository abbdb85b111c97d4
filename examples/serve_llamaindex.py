"""LlamaIndex's OpenAILike with `looseleaf serve`: the request carries nodes as documents.

It needs `pip install llama-index-llms-openai-like`.
Start `looseleaf serve` first, after `. .venv/bin/activate`.
OPENAI_BASE_URL is the server's address, OPENAI_API_KEY the API key.
"""

import os
from pathlib import Path

from llama_index.core.llms import ChatMessage
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.openai_like import OpenAILike

FOLDER = Path(__file__).parent / "documents"
QUESTION = "Where is the archive?"


def retrieve() -> list[NodeWithScore]:
    """All example documents, in place of an application's retriever."""
    nodes = [
        TextNode(text=path.read_text(encoding="utf-8"), metadata={"file_name": path.name})
        for path in sorted(FOLDER.glob("*.txt"))
    ]
    return [NodeWithScore(node=node, score=1.0) for node in nodes]


def main() -> None:
    """Print an answer from the nodes, then stream it with the nodes in reverse order."""
    llm = OpenAILike(
        model=os.environ.get("OPENAI_MODEL", "looseleaf-reference"),
        api_base=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        is_chat_model=True,
        temperature=0,
    )
    documents = [{"title": n.metadata["file_name"], "text": n.text} for n in retrieve()]
    messages = [ChatMessage(role="user", content=QUESTION)]

    answer = llm.chat(messages, extra_body={"documents": documents})
    print(answer.message.content)
    for entry in answer.raw.looseleaf["documents"]:
        print(f"  {entry['title']}: {entry['tokens']} tokens, {entry['source']}")

    for chunk in llm.stream_chat(messages, extra_body={"documents": documents[::-1]}):
        print(chunk.delta or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
