"""Latent attention in an engine: long prompts that read expanded keys, and blends of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from looseleaf import Fuse
from tests.checkpoints import make_checkpoint
from tests.engine.harness import GREEDY, TOLERANCE, document, make_llm, words, worst

PROMPTS = [
    [words(1, 30), document(1, 60), document(2, 50), words(2, 70)],
    [words(3, 20), document(2, 50), document(1, 60), words(4, 90)],
]


def answers(folder: Path, *, expands: bool, fuse: Fuse | None, **options: Any) -> list[Tensor]:
    llm = make_llm(folder, **options)
    recorder: Any = llm.engine.runner
    if not expands:
        recorder.attention.latent = None
    for prompt in PROMPTS:
        llm.generate([prompt], GREEDY, fuse=fuse)
    assert bool(recorder.attention.counters.gathered_keys) is expands
    return [torch.stack(rows) for rows in recorder.logits.values()]


@pytest.mark.parametrize(
    ("family", "fuse", "options"),
    [
        ("deepseek_v2", None, {"max_num_batched_tokens": 64, "cpu_kernels": "torch"}),
        ("deepseek_v3", Fuse("first", ratio=0.5), {}),
        ("glm4_moe_lite", Fuse("deviation", ratio=0.5), {"cpu_kernels": "torch"}),
    ],
)
def test_expanded_keys_answer_as_latents(
    tmp_path: Path, family: str, fuse: Fuse | None, options: dict[str, Any]
) -> None:
    """Also for documents at other offsets, and tokens that are computed again."""
    # with the small rank of other tests, latents are cheaper
    folder = make_checkpoint(tmp_path, family, kv_lora_rank=256)
    actual, expected = (answers(folder, expands=e, fuse=fuse, **options) for e in (True, False))
    for each, other in zip(actual, expected, strict=True):
        assert worst(each, other) <= TOLERANCE
