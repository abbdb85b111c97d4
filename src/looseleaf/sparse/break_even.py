"""The context length above which choosing pages is faster than reading all of them.

Choosing saves most of the reads, but costs a chain of small kernels in every layer, so it loses for
short contexts. One output per step is the worst case: more outputs share the chain's cost. The
length is that of one output, so neither load nor preemption changes which keys are read."""

from dataclasses import dataclass

from looseleaf.attention.plan.cost_model import CostModel
from looseleaf.config import Select
from looseleaf.sparse.policy import SparsePolicy

# microseconds a layer of one output on an H200: choosing without the reads, then a window and each
# of its rows; about a fifth above the measurements
_CHOOSING, _REVISING, _REVISED_ROW = 14.5, 4.0, 1.0
# reading all pages is faster for any context
NEVER = 2**31 - 1


@dataclass(frozen=True)
class BreakEven:
    """Break-even lengths on one device; ``per_key`` is the time to read a key and its value, of all
    KV heads, in microseconds a layer."""

    per_key: float
    page_size: int

    @classmethod
    def of(cls, costs: CostModel, num_kv_heads: int, page_size: int) -> "BreakEven":
        """From the cost model of attention."""
        narrow = costs.narrow
        return cls(narrow.per_key * num_kv_heads / narrow.programs, page_size)

    def tokens(self, select: Select, policy: SparsePolicy, window: int = 1) -> int:
        """The longest context that is faster to read whole, under the ``policy`` of ``select``,
        with a ``window`` of revised rows.

        0 for policies that do not rank by products with page summaries: they are slower except for
        very long contexts, so their caller wants the choice itself."""
        if policy.worth is not None or policy.summary is None:
            return 0
        saved = 1 - policy.summary.width / (2 * self.page_size)
        taken = _CHOOSING + (_REVISING + _REVISED_ROW * window if window > 1 else 0.0)
        overhead = taken / self.per_key
        if select.ratio is not None:
            saved -= select.ratio
        else:
            assert select.tokens is not None, "a budget is tokens or a ratio"
            overhead += select.tokens
        return min(NEVER, int(overhead / saved)) if saved > 0 else NEVER
