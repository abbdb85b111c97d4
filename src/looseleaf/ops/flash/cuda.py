"""Dense attention on a GPU with its lse, by PyTorch's kernels.

For tiles of offloaded keys that are copied to the device and read once. Queries and keys are in one
frame."""

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.types import AttnState


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
