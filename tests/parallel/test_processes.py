"""Ranks as processes: they answer as one, and end together."""

import os
import signal
import tempfile
from pathlib import Path

import pytest

from looseleaf import LLM, Document, SamplingParams
from looseleaf.errors import EngineFault, InvalidOption

PROMPT = [Document("Anna Berg keeps the red key. " * 4), "Who keeps the red key?"]
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_a_rank_that_dies_ends_the_engine_with_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    options = {"dtype": "float32", "device": "cpu", "threads": 1, "num_pages": 64}
    with LLM(**options) as single:
        [expected] = single.generate([PROMPT], PARAMS)
    with LLM(tensor_parallel=2, **options) as llm:
        [output] = llm.generate([PROMPT], PARAMS)
        assert output.token_ids == expected.token_ids
        ranks = llm.engine.ranks
        assert ranks is not None and ranks.processes is not None
        [pid] = ranks.processes.pids
        stream = llm.stream(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineFault, match="rank 1"):
            for _ in stream:
                pass
        with pytest.raises(EngineFault, match="rank 1"):
            llm.generate([PROMPT], PARAMS)
    assert not is_running(pid)
    assert not list(tmp_path.glob("looseleaf-ranks-*"))


def test_a_model_that_does_not_divide_is_refused_before_a_process_starts() -> None:
    with pytest.raises(InvalidOption, match="tensor_parallel=3 does not divide"):
        LLM(tensor_parallel=3, device="cpu")
