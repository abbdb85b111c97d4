"""The merge of decode rows, fused with attention over each row's private item.

After a long shared prefix, a row's private keys are few. A separate launch for them, and the write
and read of its states, would cost more than the keys. The program that merges a row's states
therefore also reads its keys; FlashInfer's cascade and RelayAttention use separate launches."""

from jaxtyping import Float
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.finish_rows.reference import finish_rows_reference
from looseleaf.ops.partial_attention.work_list import WorkList
from looseleaf.types import AttnState, Rotation, ScoreRule

Pages = Float[Tensor, "pages kv_heads page_size head_dim"]


def finish_rows(
    states: AttnState,
    q: Float[Tensor, "rows qo_heads head_dim"],
    pages: tuple[Pages, Pages],
    work: WorkList,
    rotation: Rotation,
    rule: ScoreRule,
    out: Float[Tensor, "rows qo_heads head_dim"],
    implementation: Implementation = "auto",
) -> AttnState:
    """One state per row: the merge of its ``states`` and of attention over its private item.

    ``states`` come from `looseleaf.ops.partial_attention`; ``work.row_own`` lists the private
    items. ``out`` is written and returned with an fp32 ``lse``. ``q`` is unrotated. The list is
    ``finishing``, without masks or explicit positions; ``rule`` has a scale only. No kernel after
    `partial_attention` may write ``q`` or the pages: they may be read before the states exist.
    Raises InvalidOption for a list without private items, with masks, or with another rule."""
    if not work.finishing or work.row_own is None:
        raise InvalidOption("this list has no private items of rows: use merge_states")
    if not rule.is_plain or work.mask_words.numel():
        raise InvalidOption(
            "finish_rows takes a plain rule and no masks: read the items with partial_attention, "
            "and use merge_states"
        )
    if choose(implementation, q) == "triton":
        from looseleaf.ops.finish_rows.kernel import finish_rows_triton

        return finish_rows_triton(states, q, pages, work, rotation, rule, out)
    return finish_rows_reference(states, q, pages, work, rotation, rule, out)
