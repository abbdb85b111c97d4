"""SnapKV (arXiv 2404.14469): keeps the prompt keys that the prompt's last tokens attend to.

Scores are the attention of the last ``observed`` rows, smoothed over neighbours. The heads of a
group share keys, so their attention is averaged; the paper keeps keys per query head."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.sparse.evicting import Evictor, best


@dataclass(frozen=True)
class SnapKV(Evictor):
    """Keeps ``capacity`` keys of a prompt, including those of the last ``observed`` tokens."""

    only_prompt: ClassVar[bool] = True
    observed: int = 32
    pool: int = 5

    def rows(self, count: int, ends_prompt: bool) -> int:
        """The last rows of the prompt."""
        return min(count, self.observed) if ends_prompt else 0

    def keep(self, scores: Float[Tensor, "kv_heads keys"]) -> Int[Tensor, "kv_heads kept"]:
        """The best keys after smoothing, and the observed rows' own."""
        smooth = torch.nn.functional.avg_pool1d(
            scores[None], self.pool, stride=1, padding=self.pool // 2, count_include_pad=False
        )[0]
        return best(smooth, self.capacity, min(self.observed, self.capacity))
