"""LangChain's ChatOpenAI with `looseleaf serve`: the request carries a retriever's documents.

It needs `pip install langchain-openai`.
Start `looseleaf serve` first, after `. .venv/bin/activate`.
OPENAI_BASE_URL is the server's address, OPENAI_API_KEY the API key.
"""

import os
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

FOLDER = Path(__file__).parent / "documents"
QUESTION = "What is the extension of the deputy of Oscar Brenwick?"


def retrieve() -> list[Document]:
    """All example documents, in place of an application's retriever."""
    return [
        Document(path.read_text(encoding="utf-8"), metadata={"source": path.name})
        for path in sorted(FOLDER.glob("*.txt"))
    ]


def main() -> None:
    """Print an answer from the documents, then stream it with the documents in reverse order."""
    llm = ChatOpenAI(
        model=os.environ.get("OPENAI_MODEL", "looseleaf-reference"),
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        temperature=0,
        stream_usage=True,
    )
    prompt = ChatPromptTemplate.from_messages([("user", "{question}")])
    documents = [{"title": d.metadata["source"], "text": d.page_content} for d in retrieve()]

    chain = prompt | llm.bind(extra_body={"documents": documents})
    answer = chain.invoke({"question": QUESTION})
    print(answer.content)
    print(f"  {answer.usage_metadata['input_tokens']} tokens read")

    chain = prompt | llm.bind(extra_body={"documents": documents[::-1]})
    for chunk in chain.stream({"question": QUESTION}):
        print(chunk.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
