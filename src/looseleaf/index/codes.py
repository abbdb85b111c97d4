"""Quantisation of keys to four bits per dim, for the comparisons of a graph walk.

All keys share one step and one zero point per dim, so a code stores no scale. The code of a key
with 128 dims fills one cache line; the key in 16 bits fills four. The step minimises the squared
error.

Rounding minimises the error of inner products with the training queries, not the error of the
keys. Dims are rounded in sequence; each dim compensates the product error of the dims before it
(LDLQ: Chee et al. 2023, QuIP, section 3.1, there for weights and inputs)."""

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from looseleaf.index.base import CPU
from looseleaf.index.keys import KeyVectors
from looseleaf.ops.native.host_memory import host_zeros

LEVELS = 16
# candidate steps in standard deviations: the optimum of a normal distribution with sixteen levels
# (Max 1960, table II), and wider ones for heavy tails
_STEPS = [0.335 * 1.5**n for n in range(-1, 8)]
_KEY_SAMPLE = 4096
_QUERY_SAMPLE = 1 << 14
_ROWS = 1 << 14
# block size of dims in the error feedback
_DIMS = 16
# added to the diagonal of the queries' products, as a share of its mean: few queries do not span
# all directions
_RIDGE = 0.01


def encode(
    keys: KeyVectors,
    order: Int[Tensor, " vertices"],
    queries: Float[Tensor, "queries head_dim"],
    device: torch.device = CPU,
) -> tuple[UInt8[Tensor, "vertices half"], Float[Tensor, " head_dim"]]:
    """The codes of the keys ``order``, and the step of each dim.

    Byte i of a code has dim i in its low four bits and dim ``half + i`` in the high ones. Component
    d of a key is about ``low[d] + steps[d] * code[d]``. ``low`` is equal for all keys and not
    stored, because it does not change rankings. Rounding is optimised for ``queries``, in the keys'
    frame, on ``device``; without queries each dim is rounded to nearest."""
    half = (keys.head_dim + 1) // 2
    codes = host_zeros((len(order), half), torch.uint8)
    if len(order) == 0:
        return codes, torch.zeros(keys.head_dim)
    sample = keys.gather(order[:: -(-len(order) // _KEY_SAMPLE)].long())
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
    """Share of the error of each dim (row) that each later dim (column) compensates, in steps.

    The strict upper triangle of U, where U D U^T is the mean outer product of queries * steps."""
    dim = len(steps)
    if len(queries) == 0:
        return torch.zeros(dim, dim)
    weights = queries[:: -(-len(queries) // _QUERY_SAMPLE)].double() * steps.double()
    # normalised, so that products do not overflow
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
    """Levels of ``values``, which are in units of steps; overwrites ``values`` with the errors."""
    levels = torch.empty_like(values)
    for first in range(0, len(values), _DIMS):
        block = slice(first, first + _DIMS)
        targets = values[block] + feedback[:first, block].T @ values[:first]
        for n in range(len(targets)):
            dim = first + n
            target = targets[n] + feedback[first:dim, dim] @ values[first:dim]
            levels[dim] = target.round_().clamp_(0, LEVELS - 1)
            values[dim] -= levels[dim]
    return levels


def quantise_queries(
    queries: Float[Tensor, "queries head_dim"], steps: Float[Tensor, " head_dim"]
) -> Int[Tensor, "queries head_dim"]:
    """Weights of codes for ``queries``: queries * steps, scaled to eight bits, as in codes.h."""
    weights = queries * steps
    top = weights.abs().amax(1, keepdim=True)
    valid = (top > 1e-30) & top.isfinite()
    scaled = torch.where(valid, weights * (127 / top), torch.zeros_like(weights))
    return scaled.round().int()


def unpack(codes: UInt8[Tensor, "codes half"], head_dim: int) -> Int[Tensor, "codes head_dim"]:
    """The integer levels of packed codes."""
    return torch.cat((codes & 15, codes >> 4), 1)[:, :head_dim].int()


def _steps_of(sample: Float[Tensor, "keys head_dim"]) -> tuple[Tensor, Tensor]:
    """For each dim the step with the least squared error, and the value of level 0."""
    mean, deviation = sample.mean(0), sample.std(0, correction=0).clamp_min(1e-30)
    best = torch.full_like(mean, torch.inf)
    steps = deviation.clone()
    for share in _STEPS:
        step = deviation * share
        low = mean - (LEVELS - 1) / 2 * step
        decoded = ((sample - low) / step).round_().clamp_(0, LEVELS - 1) * step + low
        error = ((decoded - sample) / deviation).square_().mean(0)
        steps = torch.where(error < best, step, steps)
        best = best.minimum(error)
    return steps, mean - (LEVELS - 1) / 2 * steps
