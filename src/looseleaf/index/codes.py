"""Codes of keys: four bits a dim, by which a graph's search compares before it reads keys.

In each dim all keys share one step and one place of zero, so a code needs no scale of its own:
that of a key of 128 dims is one line of memory, where the key in two bytes a dim is four. The step
is the one with the least squared error: keys that are far out widen it.

What counts is not how far a code is from its key, but how far a query's product with it is off. So
dims are rounded one after the other, each so as to make up for what rounding those before it has
done to the products with the queries that the index learns from (LDLQ: Chee et al. 2023, QuIP,
section 3.1, there for weights and their inputs)."""

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from looseleaf.index.base import CPU
from looseleaf.index.keys import KeyVectors
from looseleaf.ops.native.host_memory import host_zeros

LEVELS = 16
# the best of normal numbers for sixteen levels, in standard deviations (Max 1960, table II), and
# those of numbers that are farther out
_STEPS = [0.335 * 1.5**n for n in range(-1, 8)]
_SAMPLE = 4096
_ASKED = 1 << 14
_ROWS = 1 << 14
# dims that are rounded before their errors are brought to the others, and what is added to the
# products of queries, as a share of their mean: of few queries some directions are never asked
_DIMS = 16
_RIDGE = 0.01


def encode(
    keys: KeyVectors,
    order: Int[Tensor, " vertices"],
    queries: Float[Tensor, "queries head_dim"],
    device: torch.device = CPU,
) -> tuple[UInt8[Tensor, "vertices half"], Float[Tensor, " head_dim"]]:
    """The codes of keys ``order``, and the width of a step of each dim.

    Byte i of a code has dim i in its low four bits and dim ``half + i`` in the others. Number d of
    a key is about ``low[d] + steps[d] * code[d]``; ``low`` is that of all keys and not kept. Codes
    are rounded for ``queries``, in the keys' frame, on ``device``; without any each dim is rounded
    alone."""
    half = (keys.head_dim + 1) // 2
    codes = host_zeros((len(order), half), torch.uint8)
    if len(order) == 0:
        return codes, torch.zeros(keys.head_dim)
    sample = keys.gather(order[:: -(-len(order) // _SAMPLE)].long())
    steps, low = _steps_of(sample)
    feedback = _feedback(queries, steps).to(device)
    for first in range(0, len(order), _ROWS):
        wide = keys.gather(order[first : first + _ROWS].long())
        levels = _round(wide.sub_(low).div_(steps).T.contiguous().to(device), feedback)
        levels = levels.T.to(CPU, torch.uint8)
        packed = levels[:, :half].clone()
        packed[:, : levels.shape[1] - half] |= levels[:, half:] << 4
        codes[first : first + _ROWS] = packed
    return codes, steps


def _feedback(queries: Tensor, steps: Tensor) -> Float[Tensor, "head_dim head_dim"]:
    """How much of the error of a dim, in steps, each later dim makes up for: the part above the
    diagonal of U, where U D U^T are the queries' mean products of steps' weights."""
    dim = len(steps)
    if len(queries) == 0:
        return torch.zeros(dim, dim)
    weights = queries[:: -(-len(queries) // _ASKED)].double() * steps.double()
    # of any length and any width of steps
    weights /= weights.abs().amax().clamp_min(torch.finfo(torch.float64).tiny)
    products = weights.T @ weights
    mean = products.diagonal().mean()
    if not bool(mean > 0):
        return torch.zeros(dim, dim)
    products = products / mean + _RIDGE * torch.eye(dim, dtype=torch.float64)
    upper = torch.linalg.cholesky(products.flip(0, 1)).flip(0, 1)
    feedback: Tensor = (upper / upper.diagonal()).triu(1).float()
    return feedback


def _round(values: Float[Tensor, "head_dim keys"], feedback: Tensor) -> Tensor:
    """Levels for ``values``, in steps, which are overwritten by the errors."""
    levels = torch.empty_like(values)
    for first in range(0, len(values), _DIMS):
        own = slice(first, first + _DIMS)
        # with what the blocks before leave to make up for
        wanted = values[own] + feedback[:first, own].T @ values[:first]
        for n in range(len(wanted)):
            at = first + n
            made_up = wanted[n] + feedback[first:at, at] @ values[first:at]
            levels[at] = made_up.round_().clamp_(0, LEVELS - 1)
            values[at] -= levels[at]
    return levels


def ask_codes(
    queries: Float[Tensor, "queries head_dim"], steps: Float[Tensor, " head_dim"]
) -> Int[Tensor, "queries head_dim"]:
    """Queries as codes are compared with: steps' weights in eight bits, as codes.h has them."""
    weights = queries * steps
    top = weights.abs().amax(1, keepdim=True)
    sound = (top > 1e-30) & top.isfinite()
    scaled = torch.where(sound, weights * (127 / top), torch.zeros_like(weights))
    return scaled.round().int()


def unpack(codes: UInt8[Tensor, "codes half"], head_dim: int) -> Int[Tensor, "codes head_dim"]:
    """Codes as whole numbers, dim by dim."""
    return torch.cat((codes & 15, codes >> 4), 1)[:, :head_dim].int()


def _steps_of(sample: Float[Tensor, "keys head_dim"]) -> tuple[Tensor, Tensor]:
    """For each dim the step with the least squared error, and the number that code 0 stands for."""
    mean, deviation = sample.mean(0), sample.std(0, correction=0).clamp_min(1e-30)
    best = torch.full_like(mean, torch.inf)
    steps = deviation.clone()
    for share in _STEPS:
        step = deviation * share
        low = mean - (LEVELS - 1) / 2 * step
        again = ((sample - low) / step).round_().clamp_(0, LEVELS - 1) * step + low
        error = ((again - sample) / deviation).square_().mean(0)
        steps = torch.where(error < best, step, steps)
        best = best.minimum(error)
    return steps, mean - (LEVELS - 1) / 2 * steps
