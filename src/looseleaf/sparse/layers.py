"""Distribution of a budget over the choosing layers: equal, as a pyramid, or by weights.

The pyramid is PyramidKV's (arXiv 2406.02069, section 4.2): an arithmetic sequence that falls from
the first layer to the last, which gets a twentieth of the mean; the sum is that of equal layers.
The paper applies it to kept keys. This schedule applies to any count, pages read or keys."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from looseleaf.config import LayerBudgets, Select

_LEAST_SHARE = 1 / 20
# bisection steps, after which the interval holds one float
_HALVINGS = 64


@dataclass(frozen=True)
class Schedule:
    """Each layer's part of a budget; dense layers get none."""

    budgets: LayerBudgets = "flat"
    dense_layers: frozenset[int] = frozenset()

    @classmethod
    def of(cls, select: Select) -> "Schedule":
        """The schedule of a policy."""
        return cls(select.layer_budgets, frozenset(select.layers_read_densely))

    def spread(self, count: int, most: int, num_layers: int) -> list[int]:
        """The count of every layer, if choosing layers get ``count`` each on average and at most
        ``most``; 0 for dense layers.

        The sum is exact: excess over ``most`` goes to the other layers. A larger ``count`` never
        reduces a layer's part."""
        choosing = [layer for layer in range(num_layers) if layer not in self.dense_layers]
        counts = [0] * num_layers
        if self.budgets == "flat":
            parts = [min(count, most)] * len(choosing)
        else:
            parts = _apportioned(count * len(choosing), self._weights(choosing), most).tolist()
        for layer, own in zip(choosing, parts, strict=True):
            counts[layer] = own
        return counts

    def _weights(self, choosing: list[int]) -> npt.NDArray[np.float64]:
        if self.budgets == "pyramid":
            return np.linspace(2 - _LEAST_SHARE, _LEAST_SHARE, len(choosing))
        return np.array([float(self.budgets[layer]) for layer in choosing])


def _apportioned(total: int, weights: npt.NDArray[np.float64], most: int) -> npt.NDArray[np.int64]:
    """``total`` units by ``weights``, at most ``most`` each: weights times one scale, rounded
    (Webster's method, under which a larger total reduces no part)."""
    total = min(total, most * len(weights))

    def rounded(scale: float) -> npt.NDArray[np.int64]:
        return np.minimum(np.floor(scale * weights + 0.5), most).astype(np.int64)

    low, high = 0.0, (most + 1) / weights.min()
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rounded(middle).sum() <= total else (low, middle)
    counts = rounded(low)
    # units due at the same scale go to earlier layers first
    due = np.flatnonzero(rounded(high) > counts)[: total - counts.sum()]
    counts[due] += 1
    return counts
