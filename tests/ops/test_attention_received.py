"""Laws of attention received: the weights of a dense softmax, wherever the keys are kept."""

import pytest
import torch

from looseleaf.config import RopeConfig
from looseleaf.ops.attention_received import Readers, attention_received
from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.prefill_attention import SpanList, prefill_attention
from looseleaf.rope import build_rotation
from looseleaf.types import ScoreRule

PAGE_SIZE = 16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def spans(rows: list[int], placed: list[tuple[list[int], int, int]], words: list[int]) -> SpanList:
    """One request with all ``rows`` in tiles of 5; a span is its pages, offset and length."""
    count = [*range(0, len(rows), 5), len(rows)]

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    ends = [0]
    for pages, _, _ in placed:
        ends.append(ends[-1] + len(pages))
    return SpanList(
        num_tiles=ints([len(count) - 1]),
        tile_row_indptr=ints(count),
        tile_request=ints([0] * (len(count) - 1)),
        request_span_indptr=ints([0, len(placed)]),
        span_page_indptr=ints(ends),
        span_offset=ints([offset for _, offset, _ in placed]),
        span_length=ints([length for _, _, length in placed]),
        span_explicit=ints([0] * len(placed)),
        span_mask=ints([0 if words and n == 0 else -1 for n in range(len(placed))]),
        page_indices=ints([page for pages, _, _ in placed for page in pages]),
        mask_words=ints(words),
        row_positions=ints(rows),
    )


@pytest.mark.parametrize("implementation", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(("words", "head_dim"), [([], 16), ([0b1010, 0], 16), ([0b1010, 0], 272)])
def test_it_is_the_largest_weight_of_dense_attention(
    implementation: Implementation, window: int, words: list[int], head_dim: int
) -> None:
    """Two segments, one at an offset of its own; rows that weigh, and that count only so far."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    rotation = build_rotation(RopeConfig(head_dim, rotary_dim=16), 128, DEVICE)
    rule = ScoreRule(2.8 * head_dim**-0.5, window=window)
    k_pages, v_pages = random(2, 5, 2, PAGE_SIZE, head_dim)
    rows = [30, 41, 52, 53, 54, 60, 61]
    placed = [([3, 1], 0, 30), ([4, 0], 33, 19)]
    q = random(len(rows), 4, head_dim)
    listed = spans(rows, placed, words)
    weight = torch.rand(len(rows), generator=generator).to(DEVICE)
    before = torch.tensor([30, 33, 33, 60] * 2, device=DEVICE)
    state = prefill_attention(q, k_pages, v_pages, listed, rotation, rule)
    readers = Readers(q, state.lse, weight, before[: len(rows)].int())
    received = attention_received(readers, k_pages, listed, 49, rotation, rule, implementation)

    true = torch.cat([offset + torch.arange(n) for _, offset, n in placed]).to(DEVICE)
    frame = torch.cat([torch.arange(n) for _, _, n in placed]).to(DEVICE)
    keys = torch.cat([k_pages[p].transpose(0, 1).flatten(1, 2)[:, :n] for p, _, n in placed], 1)
    offset = true - frame

    def turned(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        (a, b), rest = x[..., :16].chunk(2, -1), x[..., 16:]
        cos, sin = rotation.cos[at], rotation.sin[at]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    at = torch.tensor(rows, device=DEVICE)
    in_frame = turned(
        q[:, :, None].expand(-1, -1, len(true), -1),
        (at[:, None] - offset).clamp_min(0)[:, None].expand(-1, 4, -1),
    )
    scores = torch.einsum("rhnd,hnd->rhn", in_frame, keys.repeat_interleave(2, 0))
    scores *= rule.softmax_scale
    distance = at[:, None] - true
    visible = distance >= 0
    if window:
        visible &= distance < window
    if words:
        visible[:, [1, 3]] = False
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    weights *= weight[:, None, None] * (true < before[: len(rows), None])[:, None]
    torch.testing.assert_close(received, weights.amax((0, 1)))
