"""New rows that read gathered keys on a CPU answer as rows that read keys in place."""

from pathlib import Path
from typing import Any

import pytest

from looseleaf import LLM, Fuse, SamplingParams
from looseleaf.attention import cpu_prompts
from tests.checkpoints import make_checkpoint
from tests.engine.harness import document, words

PROMPT = [words(1, 20), *(document(seed, 40) for seed in range(4)), words(2, 30)]
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1)
POLICIES: list[dict[str, Any]] = [{}, {"fuse": Fuse("first", ratio=0.4)}]
POLICIES += [{"fuse": Fuse("deviation", ratio=0.4)}, {"fuse": Fuse("question", ratio=0.4)}]


def scores(folder: Path, **options: Any) -> list[list[float]]:
    """The log-probabilities of the output under every policy."""
    with LLM(folder, dtype="float32", device="cpu", threads=1, num_pages=128, **options) as llm:
        outputs = [llm.generate([PROMPT], PARAMS, **policy)[0] for policy in POLICIES]
    return [[entry[0].logprob for entry in o.outputs[0].logprobs or ()] for o in outputs]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "gpt_oss"])
def test_gathered_keys_give_the_answers_of_keys_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    folder = make_checkpoint(tmp_path / "model", family)
    in_place = scores(folder)
    gathers: list[int] = []
    gather = cpu_prompts.gather_kv

    def counted(*arguments: Any) -> None:
        gathers.append(len(arguments))
        gather(*arguments)

    monkeypatch.setattr(cpu_prompts, "_MANY_ROWS", 2)
    monkeypatch.setattr(cpu_prompts, "gather_kv", counted)
    gathered = scores(folder)
    assert gathers, "no step gathered keys"
    for mine, other in zip(gathered, in_place, strict=True):
        assert mine == pytest.approx(other, abs=1e-4)


def test_a_batch_invariant_engine_reads_keys_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_prompts, "_MANY_ROWS", 2)
    monkeypatch.setattr(cpu_prompts, "gather_kv", None)
    assert scores(make_checkpoint(tmp_path / "model", "llama"), batch_invariant=True)
