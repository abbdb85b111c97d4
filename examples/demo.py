"""Answers from the example documents, twice with the documents in another order.

The second round computes no document token: keys and values know no position, so each document is
read where it now stands.
"""

import json
import sys
import time
from pathlib import Path

from looseleaf import LLM, Document, SamplingParams

HERE = Path(__file__).parent


def main() -> int:
    """Ask every question in two orders; 0 if all answers were right and nothing was recomputed."""
    documents = [
        Document(path.read_text(encoding="utf-8"), name=path.name)
        for path in sorted((HERE / "documents").glob("*.txt"))
    ]
    asked = [
        entry
        for entry in json.loads((HERE / "questions.json").read_text(encoding="utf-8"))
        # a chain needs a document that read the ones before it: see docs/documents.md
        if entry["task"] != "chain"
    ]
    llm = LLM()
    params = SamplingParams(temperature=0.0, max_tokens=64)
    num_wrong = 0
    for title, ordered in (("in order", documents), ("the other way round", documents[::-1])):
        print(f"\nDocuments {title}: {', '.join(str(d.name) for d in ordered)}")
        start = time.perf_counter()
        conversations = [
            [{"role": "user", "content": [*ordered, entry["question"]]}] for entry in asked
        ]
        outputs = llm.chat(conversations, params)
        seconds = time.perf_counter() - start
        for entry, output in zip(asked, outputs, strict=True):
            right = output.text.strip() == entry["answer"]
            num_wrong += not right
            mark = "right" if right else f"wrong, expected: {entry['answer']}"
            print(f"  {entry['question']}\n    {output.text.strip()}  ({mark})")
        print(f"  {len(asked)} answers in {seconds:.2f} s. The first request:")
        print("    " + str(outputs[0].reuse).replace("\n", "\n    "))
    recomputed = outputs[0].reuse.document_tokens_computed
    print(f"\nDocument tokens computed in the second round: {recomputed}")
    return int(num_wrong > 0 or recomputed > 0)


if __name__ == "__main__":
    sys.exit(main())
