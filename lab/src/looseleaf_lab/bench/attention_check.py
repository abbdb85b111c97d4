"""A check of attention before its timing, against fp64 on a few rows.

The allowed error is twice that of plain attention in the dtype of the pages, plus one rounding
step. Both come from the data. A few rows give few errors with a random maximum, so plain attention
sums dims and keys in several orders."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from looseleaf.attention.plan.groups import ReadSpan
from looseleaf.ops.rotate.reference import rotate_wide
from looseleaf.types import Rotation, ScoreRule
from looseleaf_lab.bench.attention_cases import Case
from looseleaf_lab.errors import BenchmarkRefused

_SAMPLES = 6
_ORDERS = 12


@dataclass(frozen=True)
class Truth:
    """The input of the true answer: the pages of a layer ``[planes, pages, …]``, angles and scale.

    Outputs have no values before the dim ``first``."""

    pages: Tensor
    rotation: Rotation
    rule: ScoreRule
    first: int = 0


def check(case: Case, q: Tensor, out: Tensor, truth_of: Truth) -> float:
    """The largest error of a few rows as a share of the allowed error.

    Raises BenchmarkRefused for a share above 1.
    """
    all_rows = _rows(case)
    sampled = random.Random(0).sample(range(len(all_rows)), min(_SAMPLES, len(all_rows)))
    error = plain_error = largest = 0.0
    for row in {*sampled, len(all_rows) - 1}:
        position, spans = all_rows[row]
        truth = _attend(q[row].double(), position, spans, truth_of, torch.float64)
        largest = max(largest, float(truth.abs().max()))
        for order in range(_ORDERS):
            plain = _attend(q[row], position, spans, truth_of, q.dtype, order)
            plain_error = max(plain_error, float((plain.double() - truth).abs().max()))
        # NaN is never equal to itself, and counts as an infinite error
        row_error = float((out[row, :, truth_of.first :].double() - truth).abs().max())
        error = max(error, row_error if row_error == row_error else float("inf"))
    worst = error / (2 * plain_error + torch.finfo(q.dtype).eps * largest)
    if worst > 1:
        raise BenchmarkRefused(
            f"{case.name}: the error is {worst:.2f} times what rounding explains, so no time is "
            "reported: run the tests of the operators"
        )
    return worst


def _rows(case: Case) -> list[tuple[int, tuple[ReadSpan, ...]]]:
    rows = [(row.position, (*row.settled, row.tail)) for row in case.rows]
    return rows + [(p, chunk.spans) for chunk in case.chunks for p in chunk.positions]


def _attend(
    q: Tensor,
    position: int,
    spans: tuple[ReadSpan, ...],
    truth_of: Truth,
    dtype: torch.dtype,
    order: int = 0,
) -> Tensor:
    """The output of one row, ``[heads, head_dim]``, with all values in ``dtype``; ``order`` seeds
    the order of sums over dims and keys."""
    pages = truth_of.pages
    group = q.shape[0] // pages.shape[2]
    generator = torch.Generator().manual_seed(order)
    dims = torch.randperm(q.shape[-1], generator=generator).to(q.device)
    scores, values = [], []
    for span in spans:
        visible = min(span.length, position - span.offset + 1)
        if visible <= 0:
            continue
        planes = pages[:, list(span.pages)].transpose(1, 2).flatten(2, 3)[:, :, :visible].to(dtype)
        k, v = planes[0], planes[-1][..., truth_of.first :]
        position_in_frame = torch.tensor([position - span.offset], device=q.device)
        rotated = rotate_wide(q[None], position_in_frame, truth_of.rotation)[0].to(dtype)
        rotated = rotated[:, dims].unflatten(0, (-1, group))
        product = torch.einsum("hgd,hnd->hgn", rotated, k[..., dims])
        scores.append(product.to(torch.promote_types(dtype, torch.float32)))
        values.append(v)
    score, value = torch.cat(scores, -1), torch.cat(values, 1)
    keys = torch.randperm(score.shape[-1], generator=generator).to(q.device)
    weight = (score[..., keys] * truth_of.rule.softmax_scale).softmax(-1).to(dtype)
    return torch.einsum("hgn,hnd->hgd", weight, value[:, keys]).flatten(0, 1)
