"""The merge of decode rows that reads, in the same launch, what each row reads alone.

Behind a long prefix that many rows share, what a row has of its own is short: a launch for it, and
states to write and read again, cost more than its keys. So the program that merges a row's states
reads them (FlashInfer's cascade and RelayAttention have a launch for each)."""

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
    """One state a row: its ``states`` (of `looseleaf.ops.partial_attention`) merged with attention
    over the item that it reads alone, ``work.row_own``. ``out`` is written, and returned.

    ``work`` is ``finishing``: plain, without masks and explicit positions; ``rule`` has a scale and
    nothing else. ``q`` is unrotated, ``lse`` of the result is fp32. Nothing writes ``q`` or the
    pages after the operator that makes the states: they may be read before these are there. Raises
    InvalidOption for another list or rule."""
    if not work.finishing or work.row_own is None:
        raise InvalidOption("rows of this list read no item alone: use merge_states")
    if not rule.is_plain or work.mask_words.numel():
        raise InvalidOption(
            "rows are finished by a plain rule and without masks: read their items with "
            "partial_attention, and use merge_states"
        )
    if choose(implementation, q) == "triton":
        from looseleaf.ops.finish_rows.kernel import finish_rows_triton

        return finish_rows_triton(states, q, pages, work, rotation, rule, out)
    return finish_rows_reference(states, q, pages, work, rotation, rule, out)
