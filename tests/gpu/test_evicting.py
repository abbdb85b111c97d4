"""Policies that throw keys away on a CUDA device: what is kept, and answered, is the CPU's."""

import pytest
import torch

from looseleaf import LLM, SamplingParams, Select
from looseleaf.config import EVICTING
from looseleaf.prompt.request import Request
from tests.engine.harness import words

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)
KEPT = 96


def answers(device: str, policy: str) -> tuple[list[tuple[int, ...]], list[int]]:
    """Of one batch tokens under the policy, of two texts, and without one; and the most pages that
    each text held once its prompt was computed."""
    llm = LLM(dtype="float32", device=device, num_pages=128)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    select = Select(policy, tokens=KEPT)  # type: ignore[arg-type]
    added, most = [], [0, 0, 0]
    for n, how in enumerate((select, None, select)):
        parts = llm.engine.prompts.from_parts([words(n, 160 + 70 * n)])
        added.append(llm.engine.add(Request(f"{n}", parts, params, select=how)))
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check()
        for n, progress in enumerate(added):
            sequence = progress.outputs[0].sequence
            if len(sequence.output_token_ids) > 1:
                most[n] = max(most[n], len(sequence.tail.pages))
    return [progress.output().outputs[0].token_ids for progress in added], most


@pytest.mark.parametrize("policy", EVICTING)
def test_what_is_kept_on_the_gpu_is_what_the_cpu_keeps(policy: str) -> None:
    (mine, pages), (other, expected) = (answers(device, policy) for device in ("cuda", "cpu"))
    # a step that is launched ahead may have taken a page more for who keeps everything
    assert mine == other and pages[::2] == expected[::2]
    # SnapKV keeps what it generates, the others a page more than they are to
    most = KEPT + (40 if policy == "snapkv" else 16)
    assert max(pages[0], pages[2]) <= most // 16 + 1
    assert pages[1] > pages[0]
