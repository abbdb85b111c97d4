"""The APE feature (arXiv 2502.05431): decode rows, and tail rows of chunks, use APE attention."""

from collections.abc import Sequence
from dataclasses import dataclass

from looseleaf.attention.paged import PagedAttention
from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.attention.plan.groups import DecodeRow
from looseleaf.blend.ape import Apart, ApartStep
from looseleaf.config import Fuse
from looseleaf.prompt.feature import Feature, FeatureRows
from looseleaf.types import Attend


@dataclass(frozen=True)
class ApeRows(Feature):
    """An output attends to its documents with the temperature and scale of ``fuse``."""

    replays = False
    attention: PagedAttention
    fuse: Fuse

    def wrap(self, attend: Attend, rows: FeatureRows, last_rows: Sequence[int] | None) -> Attend:
        own = rows.read
        if isinstance(own, DecodeRow):
            own = PrefillChunk([own.position], (*own.settled, own.tail))
        elif not rows.in_tail:
            return attend
        documents, fuse = rows.sequence.spans_apart(), self.fuse
        apart = Apart(rows.rows, own, documents, fuse.temperature, fuse.scale)
        return ApartStep(self.attention, attend, [apart], last_rows)
