"""StreamingLLM (arXiv 2309.17453): the newest pages and the first few, independent of the keys.

Keys keep their true positions. The paper moves them together, which frames make unnecessary."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.attention.select.policy import Candidates
from looseleaf.sparse.policy import Scorer


@dataclass(frozen=True)
class Window(Scorer):
    """Scores later pages higher."""

    def scores(
        self, layer: int, q: Float[Tensor, "rows qo_heads head_dim"], candidates: Candidates
    ) -> Float[Tensor, "rows kv_heads group most"]:
        """The ordinal of the page."""
        rows, most = candidates.table.pages.shape
        heads = candidates.num_kv_heads
        ordinal = torch.arange(most, device=q.device, dtype=torch.float32)
        return ordinal.expand(rows, heads, q.shape[1] // heads, most)
