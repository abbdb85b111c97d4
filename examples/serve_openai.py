"""The official OpenAI client with `looseleaf serve`: the request's extra body has the documents.

It needs `pip install openai`.
Start `looseleaf serve` first, after `. .venv/bin/activate`.
OPENAI_BASE_URL is the server's address, OPENAI_API_KEY the API key.
"""

import os
from pathlib import Path

from openai import OpenAI

DOCUMENTS = [
    {"title": path.name, "text": path.read_text(encoding="utf-8")}
    for path in sorted((Path(__file__).parent / "documents").glob("*.txt"))
]
QUESTION = "Where does the person who signs travel requests live?"


def main() -> None:
    """Ask twice; the second request reuses all documents, in reverse order. Then stream."""
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": QUESTION}]
    for documents in (DOCUMENTS, DOCUMENTS[::-1]):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=0,
            max_tokens=128,
            extra_body={"documents": documents},
        )
        print(answer.choices[0].message.content)
        # an extension of the OpenAI schema
        for entry in answer.looseleaf["documents"]:
            print(f"  {entry['title']}: {entry['tokens']} tokens, {entry['source']}")

    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=128,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"documents": DOCUMENTS},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:
            print(f"\n  {chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens")


if __name__ == "__main__":
    main()
