"""Dense attention on a GPU with its lse, by PyTorch's kernels.

For tiles of offloaded keys that are copied to the device and read once. Queries and keys are in one
frame."""

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.types import AttnState

# the library's kernels have no wider heads
_MOST_DIMS = 256


def attend_dense_cuda(
    q: Float[Tensor, "rows qo_heads head_dim"],
    k: Float[Tensor, "kv_heads keys head_dim"],
    v: Float[Tensor, "kv_heads keys head_dim"],
    softmax_scale: float,
    causal: bool = False,
) -> AttnState:
    """The fp32 state of all rows over all keys; products are in the dtype of ``k``.

    ``causal``: row i sees keys up to i, and rows equal keys in number."""
    rows, heads, dim = q.shape
    group = heads // k.shape[0]
    q = q.to(k.dtype)
    if dim > _MOST_DIMS:
        return _attend_products(q, k, v, softmax_scale, causal)
    if causal:
        queries = q.transpose(0, 1)
        k, v = (side.repeat_interleave(group, 0) for side in (k, v))
    else:
        # without a mask, the heads of a group are rows of one head
        queries = q.view(rows, -1, group, dim).transpose(0, 1).reshape(-1, rows * group, dim)
    inputs = queries[None].contiguous(), k[None].contiguous(), v[None].contiguous()
    if k.dtype == torch.float32:
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
            *inputs, None, True, 0.0, causal, scale=softmax_scale
        )[:2]
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            *inputs, 0.0, causal, False, scale=softmax_scale
        )[:2]
    # the library may pad the lse after the last row
    out, lse = out[0].float(), lse[0, :, : queries.shape[1]].float()
    if causal:
        return AttnState(out.transpose(0, 1).contiguous(), lse.transpose(0, 1).contiguous())
    out = out.view(-1, rows, group, dim).transpose(0, 1).reshape(rows, heads, dim)
    return AttnState(out, lse.view(-1, rows, group).transpose(0, 1).reshape(rows, heads))


def _attend_products(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool
) -> AttnState:
    """`attend_dense_cuda` by two products, for wide heads."""
    rows, heads, dim = q.shape
    grouped = q.view(rows, len(k), -1, dim)
    scores = torch.einsum("rkgd,knd->kgrn", grouped, k).float() * softmax_scale
    if causal:
        later = torch.ones(rows, k.shape[1], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().to(v.dtype)
    out = torch.einsum("kgrn,knd->rkgd", weights, v).float()
    return AttnState(out.reshape(rows, heads, dim), lse.permute(2, 0, 1).reshape(rows, heads))
