"""Vector indexes over a segment's keys: which keys a query reads without comparing all of them.

Keys stand in their segment's frame, so an index that was built once is right wherever the segment
is read, for a query that was turned into that frame. This layer knows vectors, not tokens."""

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
