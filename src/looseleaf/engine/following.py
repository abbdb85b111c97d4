"""The attention of a step whose documents are arriving: a layer's keys come before its rows."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from looseleaf.kv.store import Arriving
from looseleaf.types import Attend


@dataclass
class Following:
    """``attend`` behind what is ``awaited``, layer by layer; ``waited`` counts the seconds that the
    host waited for it."""

    attend: Attend
    awaited: Sequence[Arriving]
    waited: float = 0.0

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        begun = time.perf_counter()
        for arriving in self.awaited:
            arriving.wait(layer)
        self.waited += time.perf_counter() - begun
        return self.attend(layer, q, k, v)
