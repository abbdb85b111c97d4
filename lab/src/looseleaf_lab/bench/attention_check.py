"""Whether the answers that are about to be timed are right: attention in fp64 on some rows.

The error allowed is twice that of attention computed plainly in the dtype of the pages, plus one
rounding; both come from the data at hand. A few rows have few errors, the largest of which is a
matter of luck, so plain attention sums dims and keys in several orders.
"""

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
    """What the answers follow from: the pages of a layer ``[2, pages, …]``, angles and scale."""

    pages: Tensor
    rotation: Rotation
    rule: ScoreRule


def check(case: Case, q: Tensor, out: Tensor, truth_of: Truth) -> float:
    """The largest error of some rows as a share of what is allowed.

    Raises BenchmarkRefused if it is more than that.
    """
    every = _rows(case)
    chosen = random.Random(0).sample(range(len(every)), min(_SAMPLES, len(every)))
    error = plain_error = largest = 0.0
    for row in {*chosen, len(every) - 1}:
        position, spans = every[row]
        truth = _attend(q[row].double(), position, spans, truth_of, torch.float64)
        largest = max(largest, float(truth.abs().max()))
        for order in range(_ORDERS):
            plain = _attend(q[row], position, spans, truth_of, q.dtype, order)
            plain_error = max(plain_error, float((plain.double() - truth).abs().max()))
        # what is not a number is wrong by any measure
        away = float((out[row].double() - truth).abs().max())
        error = max(error, away if away == away else float("inf"))
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
    """The output of one row, ``[heads, head_dim]``, with everything stored in ``dtype``; ``order``
    names one in which dims and keys are summed."""
    pages = truth_of.pages
    group = q.shape[0] // pages.shape[2]
    drawn = torch.Generator().manual_seed(order)
    dims = torch.randperm(q.shape[-1], generator=drawn).to(q.device)
    scores, values = [], []
    for span in spans:
        seen = min(span.length, position - span.offset + 1)
        if seen <= 0:
            continue
        k, v = pages[:, list(span.pages)].transpose(1, 2).flatten(2, 3)[:, :, :seen].to(dtype)
        at = torch.tensor([position - span.offset], device=q.device)
        turned = rotate_wide(q[None], at, truth_of.rotation)[0].to(dtype)
        turned = turned[:, dims].unflatten(0, (-1, group))
        product = torch.einsum("hgd,hnd->hgn", turned, k[..., dims])
        scores.append(product.to(torch.promote_types(dtype, torch.float32)))
        values.append(v)
    score, value = torch.cat(scores, -1), torch.cat(values, 1)
    keys = torch.randperm(score.shape[-1], generator=drawn).to(q.device)
    weight = (score[..., keys] * truth_of.rule.softmax_scale).softmax(-1).to(dtype)
    return torch.einsum("hgn,hnd->hgd", weight, value[:, keys]).flatten(0, 1)
