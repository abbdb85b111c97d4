"""Measures what a request and a decode step pass: files, functions and calls of `looseleaf`.

Prints a table; ``--files`` lists the files of each journey with their calls. The profiler counts
every Python function of the package that starts or resumes, comprehensions as Python 3.11 runs
them included.
"""

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import looseleaf
from looseleaf import LLM, Document, Fuse, SamplingParams

_ROOT = f"{Path(looseleaf.__file__).parent}/"
_PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
_LONG = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
# steps before the measured ones, and how many are measured
_BEFORE, _STEPS = 4, 9


@dataclass(frozen=True)
class Journey:
    """The calls of each function that one piece of work passes."""

    name: str
    functions: Counter[CodeType]

    @property
    def files(self) -> Counter[str]:
        """The calls of each file, by its path in the package."""
        files: Counter[str] = Counter()
        for code, calls in self.functions.items():
            files[code.co_filename.removeprefix(_ROOT)] += calls
        return files

    @property
    def num_calls(self) -> int:
        """All calls."""
        return self.functions.total()


def measure(name: str, work: Callable[[], object]) -> Journey:
    """The journey of ``work`` in this thread."""
    functions: Counter[CodeType] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_ROOT):
            functions[frame.f_code] += 1

    # finalizers of other engines are no part of the journey
    gc.collect()
    gc.disable()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return Journey(name, functions)


def plain_request(llm: LLM) -> Journey:
    """A prompt without documents, from `LLM.generate` to its output."""
    llm.generate("Who signs the requests?", _PARAMS)
    return measure("request", lambda: llm.generate("Who signs travel requests?", _PARAMS))


def decode_step(llm: LLM) -> Journey:
    """A decode step of one output; of several steps, the one with the median number of calls."""
    stream = llm.stream("Who signs travel requests of the staff?", _LONG)
    for _ in range(_BEFORE):
        next(stream)
    steps = [measure("decode step", llm.engine.step) for _ in range(_STEPS)]
    for _ in stream:
        pass
    return sorted(steps, key=lambda step: step.num_calls)[_STEPS // 2]


def fuse_request(llm: LLM) -> Journey:
    """A prompt with two documents whose first tokens are computed again."""
    text, fuse = "Travel requests are signed by Ada. ", Fuse("first", tokens=16)
    prompt: list[str | Document] = [Document(text * 4), Document(text * 5), "Who signs requests?"]
    llm.generate([prompt], _PARAMS, fuse=fuse)
    return measure("fuse request", lambda: llm.generate([prompt], _PARAMS, fuse=fuse))


def journeys() -> list[Journey]:
    """All three, of the reference model on the CPU."""
    with LLM(device="cpu", num_pages=256) as llm:
        return [plain_request(llm), decode_step(llm), fuse_request(llm)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="files, functions and calls that work passes")
    parser.add_argument("--files", action="store_true", help="list the files of each journey")
    asked = parser.parse_args()
    found = journeys()
    print(f"{'journey':14}{'files':>7}{'functions':>11}{'calls':>7}")
    for one in found:
        print(f"{one.name:14}{len(one.files):7}{len(one.functions):11}{one.num_calls:7}")
    for one in found if asked.files else ():
        print(f"\n{one.name}")
        for path, calls in sorted(one.files.items()):
            print(f"  {path:44}{calls:7}")


if __name__ == "__main__":
    main()
