"""What one output tells of itself while it is made."""

from typing import Any

import pytest

from looseleaf import SamplingParams
from looseleaf.engine.progress import OutputProgress
from looseleaf.engine.sampling.sampler import TokenLogprob
from tests.engine.harness import Folder, make_llm, words


class Entry(tuple[TokenLogprob, ...]):
    """The log-probabilities of one token; counts how often one of them is read."""

    __slots__ = ()
    read = 0

    def __getitem__(self, place: Any) -> Any:
        Entry.read += 1
        return super().__getitem__(place)


def test_the_sum_of_log_probabilities_is_told_without_reading_them_all_again(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = OutputProgress.push

    def counted(self: OutputProgress, token: int, logprobs: tuple[TokenLogprob, ...]) -> None:
        push(self, token, Entry(logprobs))

    monkeypatch.setattr(OutputProgress, "push", counted)
    params = SamplingParams(max_tokens=40, logprobs=1, seed=1, ignore_eos=True)
    reads, last = [], 0
    for output in make_llm(checkpoint()).stream([words(1, 9)], params):
        reads.append(Entry.read - last)
        told = output.outputs[0]
        assert told.logprobs is not None
        assert told.cumulative_logprob == pytest.approx(
            sum(entry[0].logprob for entry in told.logprobs)
        )
        last = Entry.read
    assert len(reads) == 40
    assert reads[-1] <= reads[1]
