"""Attention over a union of disjoint key sets, from the attention over each: the log-sum-exp merge.

Rows take a varying number of states, listed in CSR form, and may start from a carried state. The
merge commutes, associates and has ``(0, -inf)`` as its unit (docs/ideas.md)."""

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.merge_states.kept import KeptStates
from looseleaf.ops.merge_states.reference import merge_states_reference
from looseleaf.types import AttnState

__all__ = ["KeptStates", "merge_states"]


def merge_states(
    states: AttnState,
    row_state_indptr: Int[Tensor, " rows_plus_one"],
    carried: AttnState | None = None,
    out: Float[Tensor, "rows heads head_dim"] | None = None,
    kept: KeptStates | None = None,
    implementation: Implementation = "auto",
    *,
    at_once: bool = False,
    sent: bool = False,
) -> AttnState:
    """One state a row: row ``r`` merges ``states[row_state_indptr[r]:row_state_indptr[r + 1]]``.

    ``states.out`` is ``[states, heads, head_dim]``, ``states.lse`` fp32 ``[states, heads]``; both
    may have capacity past the last one used, never read. ``carried`` has one state a row and joins
    it. The result's ``out`` is in the dtype of ``out``, which is written if given, else of
    ``states.out``. No state, or only empty ones: ``(0, -inf)``. With ``kept``, instead of
    ``carried``, the last states of a row are merged with what it has kept, which is kept, and then
    with the others. ``at_once``: most rows have several states, but few, to be read at once; then a
    row may have other bits among many rows than among few. ``sent``: ``row_state_indptr`` came from
    the host, or from a kernel that others stand behind, so that it may be read while the kernel
    before this one still runs. An lse that is not a number makes the row NaN. Raises InvalidOption
    for rows with ``carried`` and ``kept``."""
    if carried is not None and kept is not None:
        raise InvalidOption("a row starts from one state: what is carried, or what it has kept")
    if choose(implementation, states.lse) == "triton":
        from looseleaf.ops.merge_states.kernel import merge_states_triton

        how = {"at_once": at_once, "sent": sent}
        return merge_states_triton(states, row_state_indptr, carried, out, kept, **how)
    return merge_states_reference(states, row_state_indptr, carried, out, kept)
