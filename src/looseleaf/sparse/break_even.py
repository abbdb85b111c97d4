"""From how many tokens on an output is produced faster if it chooses pages than if it reads all.

Choosing saves most of the reading and costs a chain of small kernels in every layer, so behind a
short context it loses. A step of one output is the worst case: with more of them the chain is the
same and what it saves is more. The number here is that of one output, so that it is the same
whatever else is in the step, and neither load nor preemption has a say in which keys are read."""

from dataclasses import dataclass

from looseleaf.attention.plan.cost_model import CostModel
from looseleaf.config import Select
from looseleaf.sparse.policy import SparsePolicy

# microseconds a layer of one output on an H200: what choosing takes besides reading, and what a
# window takes besides and for each of its rows; about a fifth more than was measured
_CHOOSING, _REVISING, _REVISED_ROW = 14.5, 4.0, 1.0
# where reading all is faster behind any context that there is
NEVER = 2**31 - 1


@dataclass(frozen=True)
class BreakEven:
    """Break-even lengths on one device; ``per_key`` is how many microseconds a layer takes to read
    a key and its value, of all KV heads."""

    per_key: float
    page_size: int

    @classmethod
    def of(cls, costs: CostModel, num_kv_heads: int, page_size: int) -> "BreakEven":
        """By what attention costs."""
        narrow = costs.narrow
        return cls(narrow.per_key * num_kv_heads / narrow.programs, page_size)

    def tokens(self, select: Select, policy: SparsePolicy, window: int = 1) -> int:
        """The longest context that had better be read whole, under ``policy``, that of ``select``,
        with a ``window`` of revised rows. 0 for policies that do not choose by the largest products
        with what is kept of pages: they are slower than reading all unless that is very long, and
        whoever asks for one wants its choice."""
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
