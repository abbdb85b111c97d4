"""How a budget is spread over the layers that choose: all alike, as a pyramid, or by weights.

The pyramid is PyramidKV's (arXiv 2406.02069, section 4.2): an arithmetic sequence that falls from
the first layer to the last, which gets a twentieth of the mean; the layers together get what they
would get if all were alike. The paper says so of keys that are kept; here it is a schedule for
whatever is counted, pages that are read or keys."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from looseleaf.config import LayerBudgets, Select

_LEAST_SHARE = 1 / 20
# halvings of an interval, after which it holds one number
_HALVINGS = 64


@dataclass(frozen=True)
class Schedule:
    """What each layer gets of a budget; layers that are dense get none of it."""

    budgets: LayerBudgets = "flat"
    dense_layers: frozenset[int] = frozenset()

    @classmethod
    def of(cls, select: Select) -> "Schedule":
        """The schedule of a policy."""
        return cls(select.layer_budgets, frozenset(select.layers_read_densely))

    def spread(self, count: int, most: int, num_layers: int) -> list[int]:
        """What every layer gets, if those that choose get ``count`` each on average and none can
        use more than ``most``; 0 for dense layers.

        Together they get ``count`` times their number, to the unit: what one can't use goes to the
        others. With a larger ``count`` no layer gets less."""
        choosing = [layer for layer in range(num_layers) if layer not in self.dense_layers]
        counts = [0] * num_layers
        if self.budgets == "flat":
            given = [min(count, most)] * len(choosing)
        else:
            given = _apportioned(count * len(choosing), self._weights(choosing), most).tolist()
        for layer, own in zip(choosing, given, strict=True):
            counts[layer] = own
        return counts

    def _weights(self, choosing: list[int]) -> npt.NDArray[np.float64]:
        if self.budgets == "pyramid":
            return np.linspace(2 - _LEAST_SHARE, _LEAST_SHARE, len(choosing))
        return np.array([float(self.budgets[layer]) for layer in choosing])


def _apportioned(total: int, weights: npt.NDArray[np.float64], most: int) -> npt.NDArray[np.int64]:
    """``total`` units by ``weights``, each no more than ``most``: every weight times one number,
    rounded (Webster's method, under which nobody loses by a larger total)."""
    total = min(total, most * len(weights))

    def given(scale: float) -> npt.NDArray[np.int64]:
        return np.minimum(np.floor(scale * weights + 0.5), most).astype(np.int64)

    low, high = 0.0, (most + 1) / weights.min()
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if given(middle).sum() <= total else (low, middle)
    counts = given(low)
    # whose next unit is due at the same number: the earlier layer first
    due = np.flatnonzero(given(high) > counts)[: total - counts.sum()]
    counts[due] += 1
    return counts
