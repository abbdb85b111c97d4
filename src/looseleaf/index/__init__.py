"""Vector indexes over the keys of a segment: approximate nearest-key search by inner product.

Keys are rotated in the frame of their segment (counted from its first token). One index is
therefore valid at every position of the segment, for queries rotated into that frame. README.md has
the equation; `host` reads segments in host memory."""

from looseleaf.index.base import Hits, KVIndex
from looseleaf.index.choosing import choose_index
from looseleaf.index.estimating import attend_estimated
from looseleaf.index.graph import GraphIndex
from looseleaf.index.ivf import IvfIndex
from looseleaf.index.keys import KeyVectors
from looseleaf.index.make import build_index, load_index
from looseleaf.index.searching import search, search_each
from looseleaf.index.segment import Heads, SegmentIndex, build_segment

__all__ = [
    "GraphIndex",
    "Heads",
    "Hits",
    "IvfIndex",
    "KVIndex",
    "KeyVectors",
    "SegmentIndex",
    "attend_estimated",
    "build_index",
    "build_segment",
    "choose_index",
    "load_index",
    "search",
    "search_each",
]
