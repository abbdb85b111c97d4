"""Which new rows over latent keys attend to expanded keys, by a cost model, and their span list.

Expanded keys take fewer products a pair of row and key, but each key is expanded first. Keys are
gathered into prompt order before, so patches, hidden keys and frames need no further rule."""

from collections.abc import Sequence

from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.attention.plan.gathered import MOST_GATHERED, gather_chunks, gathered_spans
from looseleaf.attention.plan.host_spans import HostSpans
from looseleaf.attention.plan.lists import PageArray, int32
from looseleaf.config import LatentConfig

# rows of a tile: a head of expanded keys serves one query head
_TILE_ROWS = 128
# times in products over latents (docs/log.md): of a product elsewhere, and of a byte to or from
# memory, on an H100 with 16 bits and on a CPU core
_PRODUCT = {"cuda": 0.33, "cpu": 1.0}
_BYTE = {"cuda": 75, "cpu": 8}


def worth_expanding(
    chunks: Sequence[PrefillChunk], latent: LatentConfig, itemsize: int, device_type: str
) -> bool:
    """Whether the rows of ``chunks`` read expanded keys faster than latents.

    The costs are times of one head. A GPU reads latents by a slower kernel than keys of few dims.
    ``itemsize`` is that of expanded keys."""
    rows = sum(len(chunk.positions) for chunk in chunks)
    keys = sum(int(chunk.positions[-1]) + 1 for chunk in chunks)
    pairs = sum(int(int32(chunk.positions).sum()) + len(chunk.positions) for chunk in chunks)
    # maps of a row's query and output, or of a key and its value
    maps = latent.rank * (latent.nope_dim + latent.value_dim)
    moved = 2 * 2 * latent.expanded_dim * itemsize * _BYTE[device_type]
    product = _PRODUCT[device_type]
    products = pairs * (2 * latent.expanded_dim - latent.rope_dim) + keys * maps
    expanded = product * products + keys * moved
    return expanded < pairs * (latent.key_dim + latent.rank) + product * rows * maps


def expanded_spans(
    chunks: Sequence[PrefillChunk], page_size: int, page_array: PageArray = int32
) -> HostSpans | None:
    """The span list of ``chunks`` over gathered keys; None if they can't be gathered.

    States of host-resident segments are over latents, so chunks with such reads are refused."""
    keys = sum(int(chunk.positions[-1]) + 1 for chunk in chunks)
    if keys > MOST_GATHERED or any(chunk.hosted for chunk in chunks):
        return None
    gathered = gather_chunks(chunks, page_size, page_array)
    return None if gathered is None else gathered_spans(gathered, _TILE_ROWS)
