"""LangChain's ChatOpenAI against `looseleaf serve`: what a retriever found goes along as documents.

It needs `pip install langchain-openai`.
Start `looseleaf serve` first, after `. .venv/bin/activate`.
OPENAI_BASE_URL and OPENAI_API_KEY say where it is and who asks.
"""

import os
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

FOLDER = Path(__file__).parent / "documents"
QUESTION = "What is the extension of the deputy of Oscar Brenwick?"


def retrieve() -> list[Document]:
    """All example documents; in an application, what its retriever returns."""
    return [
        Document(path.read_text(encoding="utf-8"), metadata={"source": path.name})
        for path in sorted(FOLDER.glob("*.txt"))
    ]


def main() -> None:
    """Answers from the documents, then the same as a stream, with the documents turned round."""
    llm = ChatOpenAI(
        model=os.environ.get("OPENAI_MODEL", "looseleaf-reference"),
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        temperature=0,
        stream_usage=True,
    )
    prompt = ChatPromptTemplate.from_messages([("user", "{question}")])
    found = [{"title": d.metadata["source"], "text": d.page_content} for d in retrieve()]

    chain = prompt | llm.bind(extra_body={"documents": found})
    answer = chain.invoke({"question": QUESTION})
    print(answer.content)
    print(f"  {answer.usage_metadata['input_tokens']} tokens read")

    chain = prompt | llm.bind(extra_body={"documents": found[::-1]})
    for chunk in chain.stream({"question": QUESTION}):
        print(chunk.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
