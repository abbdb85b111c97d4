"""Times the first token of each answer twice: with new documents, and with reused documents.

Reused documents have another order and other positions. Keys and values are independent of
positions, so no document token is computed again. An argument names another model.
"""

import json
import statistics
import sys
from pathlib import Path

from looseleaf import LLM, Document, RequestOutput, SamplingParams

HERE = Path(__file__).parent
PARAMS = SamplingParams(temperature=0.0, max_tokens=64)


def ask(llm: LLM, documents: list[Document], question: str, salt: str = "") -> RequestOutput:
    """The answer to a question; requests with different salts share no keys."""
    return llm.chat([{"role": "user", "content": [*documents, question]}], PARAMS, salt=salt)[0]


def main() -> int:
    """Print both times of every question; returns 1 for a wrong answer or a recomputed token."""
    paths = sorted((HERE / "documents").glob("*.txt"))
    documents = [Document(path.read_text(encoding="utf-8"), name=path.name) for path in paths]
    entries = json.loads((HERE / "questions.json").read_text(encoding="utf-8"))
    model = sys.argv[1] if len(sys.argv) > 1 else None
    llm = LLM(model)
    print(f"{Path(model).stem if model else 'Reference model'}, {llm.engine.threads}.")
    # warmup, so compilation is not part of the times
    ask(llm, documents, "Where is the archive?")
    num_wrong, cold_times, reused_times, recomputed = 0, [], [], 0
    print(f"\n{'first token, ms:':58}{'cold':>8}{'reused':>8}")
    for entry in entries:
        question = entry["question"]
        if "needs" in entry and model is None:
            print(f"{question:58}{'skipped':>16}\n    It needs {entry['needs']}.")
            print("    Here each document is computed by itself: see docs/documents.md, context.")
            continue
        cold = ask(llm, documents, question, salt=question)
        reused = ask(llm, documents[::-1], question)
        times = [1e3 * (output.metrics.first_token or 0.0) for output in (cold, reused)]
        cold_times.append(times[0])
        reused_times.append(times[1])
        print(f"{question:58}{times[0]:8.1f}{times[1]:8.1f}\n    {reused.text.strip()}")
        num_wrong += sum(o.text.strip() != entry["answer"] for o in (cold, reused))
        recomputed += reused.reuse.document_tokens_computed
    cold_median, reused_median = statistics.median(cold_times), statistics.median(reused_times)
    print(f"\n{'median':58}{cold_median:8.1f}{reused_median:8.1f}")
    print(f"Reused, the first token comes {cold_median / reused_median:.1f} times sooner.")
    answers = "Answers unlike the expected text" if model else "Wrong answers"
    print(f"Document tokens computed again: {recomputed}. {answers}: {num_wrong}.")
    # the answers that are compared are in the reference model's words
    return int((num_wrong > 0 and model is None) or recomputed > 0)


if __name__ == "__main__":
    sys.exit(main())
