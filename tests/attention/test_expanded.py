"""Law: rows that read keys expanded from latents answer as those that read the latents."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from looseleaf.attention.paged import PagedAttention, StepRows
from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.attention.plan.expanded import worth_expanding
from looseleaf.attention.plan.groups import DecodeRow, ReadSpan
from looseleaf.config import LatentConfig, RopeConfig
from looseleaf.kv.pool import PagePool
from looseleaf.models.latent import attend_latents
from looseleaf.models.layers import LatentWeights, Norm
from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.page_dtypes import FP8
from looseleaf.rope.frames import build_rotation
from looseleaf.types import ScoreRule

SHAPE = LatentConfig(rank=256, nope_dim=24, rope_dim=16, value_dim=20)
WIDE_VALUES = replace(SHAPE, nope_dim=12)
LITE = LatentConfig(rank=512, nope_dim=128, rope_dim=64, value_dim=128)
SIZE, HEADS, NEW = 16, 2, 60
CPU = torch.device("cpu")


def mixed_step(*, patched: bool) -> StepRows:
    """A decode row, and new rows after two documents at offsets, whose tokens may be replaced."""
    first, second = range(2, 6), range(6, 9)
    shared = ReadSpan(first, 40, 60, 0), ReadSpan(second, 0, 40, 0)
    row = DecodeRow(43, (ReadSpan(second, 0, 40, 0),), ReadSpan([9], 40, 4, 0))
    replaced = np.array([3, 17, 39]) if patched else np.array([], dtype=int)
    bits = np.zeros(64, dtype=np.uint8)
    bits[replaced] = 1
    hidden = np.packbits(bits, bitorder="little").view(np.int32)
    text, positions = ReadSpan(range(20, 30), 100, NEW, 0), np.arange(100, 100 + NEW)
    new_slots = 20 * SIZE + np.arange(NEW)
    spans, places = (*shared, text), positions - 100
    if patched:
        patch = ReadSpan([31], 0, len(replaced), 0, places=replaced)
        spans = shared[0], replace(shared[1], hidden=hidden), patch, text
    slots = [9 * SIZE + 3, *(31 * SIZE + np.arange(len(replaced))), *new_slots]
    frames = [3, *replaced, *places]
    chunk = PrefillChunk(np.concatenate([replaced, positions]), spans)
    last = [0, len(slots) - 1]
    return StepRows([row], [chunk], torch.tensor(slots), torch.tensor(frames), last)


def outputs(
    shape: LatentConfig,
    step: StepRows,
    implementation: Implementation,
    kv_dtype: torch.dtype = torch.float32,
    *,
    expands: bool,
) -> list[Tensor]:
    """The values of two layers, for the same random queries and pages."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    pool = PagePool(
        num_pages=32, page_size=SIZE, num_layers=2, num_kv_heads=1, head_dim=shape.key_dim,
        planes=1, dtype=kv_dtype, device=CPU,
    )  # fmt: skip
    pool.kv.copy_(normal(*pool.kv.shape))
    pool.set_positions([31], np.array([3, 17, 39]))
    rope = RopeConfig(shape.key_dim, shape.rope_dim, interleaved=True)
    attention = PagedAttention(
        pool, (build_rotation(rope, 512),) * 2, (ScoreRule(0.05),) * 2, HEADS,
        implementation=implementation, row_dtype=torch.float32, latent=shape,
    )  # fmt: skip
    weights = LatentWeights(
        Norm(torch.ones(shape.rank)),
        normal(HEADS, shape.nope_dim, shape.rank) * shape.rank**-0.5,
        normal(HEADS, shape.rank, shape.value_dim) * shape.rank**-0.5,
    )
    attend = attention.step(replace(step, expands=expands))
    assert bool(attention.counters.gathered_keys) is expands
    rows = len(step.slots)
    q, k = normal(rows, HEADS, shape.query_dim), normal(rows, 1, shape.key_dim)
    assert step.logit_rows is not None
    return [
        attend_latents(attend, 0, q, k, weights, shape),
        attend_latents(attend, 1, q[list(step.logit_rows)], k, weights, shape),
    ]


@pytest.mark.parametrize(
    ("shape", "implementation"),
    [(WIDE_VALUES, "cpu"), (SHAPE, "cpu"), (WIDE_VALUES, "triton")],
)
def test_rows_over_expanded_keys_are_rows_over_latents(
    shape: LatentConfig, implementation: Implementation
) -> None:
    step = mixed_step(patched=shape is SHAPE)
    expected = outputs(shape, step, "reference", expands=False)
    actual = outputs(shape, step, implementation, expands=True)
    for each, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-5)


def test_latents_in_e4m3_are_expanded_as_their_numbers() -> None:
    step = mixed_step(patched=False)
    first, second = (outputs(SHAPE, step, "cpu", FP8, expands=e)[0] for e in (True, False))
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-3)


def test_short_chunks_read_latents_and_long_chunks_expanded_keys() -> None:
    def worth(start: int, rows: int, device: str = "cuda") -> bool:
        positions = range(start, start + rows)
        return worth_expanding([PrefillChunk(positions, ())], LITE, 2, device)

    assert not worth(0, 192) and worth(0, 512) and worth(0, 192, "cpu")
    assert not worth(16384, 128) and worth(16384, 256)
