"""The log-sum-exp merge: attention over a union of key sets from the attention over each set.

Each row merges a variable number of states, in CSR form, and may start from a carried state. The
merge is commutative and associative with the unit ``(0, -inf)`` (docs/ideas.md)."""

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
    few_states: bool = False,
    indptr_ready: bool = False,
) -> AttnState:
    """One state per row: row ``r`` merges ``states[row_state_indptr[r]:row_state_indptr[r + 1]]``.

    ``lse = log(sum(exp(lse_i)))`` and ``out = sum(exp(lse_i - lse) * out_i)``.

    ``states.out`` is ``[states, heads, head_dim]``, ``states.lse`` fp32 ``[states, heads]``; unused
    capacity at their end is not read. A row without states, or with empty states only, gets ``(0,
    -inf)``. An lse of NaN makes the row NaN. The result is written to ``out`` if given, in its
    dtype; else it has the dtype of ``states.out``.

    - ``carried``: one more state per row.
    - ``kept`` (`KeptStates`): a row merges its last states into its kept state, stores that, and
      merges it with the other states.
    - ``few_states``: most rows have a few states, which one program reads together. A row's bits
      may then depend on the number of rows.
    - ``indptr_ready``: the host wrote ``row_state_indptr``, or a kernel before the previous one.
      The kernel then reads it while the previous kernel runs.

    Raises InvalidOption for both ``carried`` and ``kept``, and on a CPU for fewer carried states
    than rows."""
    if carried is not None and kept is not None:
        raise InvalidOption("a row starts from one state: give carried or kept, not both")
    if choose(implementation, states.lse) == "triton":
        from looseleaf.ops.merge_states.kernel import merge_states_triton

        return merge_states_triton(
            states, row_state_indptr, carried, out, kept,
            few_states=few_states, indptr_ready=indptr_ready,
        )  # fmt: skip
    return merge_states_reference(states, row_state_indptr, carried, out, kept)
