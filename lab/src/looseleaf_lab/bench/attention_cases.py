"""What ``bench attention`` measures: batches of decode rows and of new rows, as the engine would
plan them, with the work that they cannot do without."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.attention.plan.groups import DecodeRow, ReadSpan


@dataclass(frozen=True)
class AttentionShape:
    """Heads and pages of the model whose attention is measured; ``layers`` pools take turns, so
    that no layer finds its keys in a cache."""

    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    layers: int = 3
    dtype: torch.dtype = torch.bfloat16

    @property
    def bytes_per_key(self) -> int:
        """K and V of all KV heads of one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def flops_per_pair(self) -> int:
        """Both products of one row and one key, over all heads."""
        return 4 * self.num_qo_heads * self.head_dim


@dataclass(frozen=True)
class Case:
    """Rows and chunks of one step over a pool of ``num_pages`` pages.

    ``dense`` is what a peer without pages gets: ``(batch, rows, keys)`` of one rectangle, or None
    where it would have to copy or pad.
    """

    name: str
    rows: tuple[DecodeRow, ...]
    chunks: tuple[PrefillChunk, ...]
    num_pages: int
    dense: tuple[int, int, int] | None = None
    causal: bool = False

    def pairs(self) -> int:
        """Pairs of a row and a key it sees."""
        decode = sum(span.length for row in self.rows for span in (*row.settled, row.tail))
        return decode + sum(
            max(0, min(span.length, position - span.offset + 1))
            for chunk in self.chunks
            for span in chunk.spans
            for position in chunk.positions
        )

    def distinct_keys(self, page_size: int) -> int:
        """Keys that must be read once, counted in whole pages."""
        pages = {p for row in self.rows for s in (*row.settled, row.tail) for p in s.pages}
        pages |= {p for chunk in self.chunks for span in chunk.spans for p in span.pages}
        return len(pages) * page_size

    @property
    def num_rows(self) -> int:
        return len(self.rows) + sum(len(chunk.positions) for chunk in self.chunks)

    @property
    def longest(self) -> int:
        """Positions that the rotation table must have."""
        last = [row.position for row in self.rows]
        return 1 + max([*last, *(chunk.positions[-1] for chunk in self.chunks)])


class _Pages:
    """Hands out the pages of a pool in random order, as they are in a pool that has been used."""

    def __init__(self, num_pages: int, page_size: int, seed: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages))
        random.Random(seed).shuffle(self._free)

    def span(self, length: int, offset: int, *, settled: bool) -> ReadSpan:
        """A span of ``length`` keys with pages of its own."""
        count = -(-length // self.page_size)
        pages = [self._free.pop() for _ in range(count)]
        return ReadSpan(pages, offset, length, count if settled else 0)


def _moved(span: ReadSpan, offset: int) -> ReadSpan:
    """The same pages at another place."""
    return ReadSpan(span.pages, offset, span.length, span.sharable)


def _row(settled: Sequence[ReadSpan], tail: ReadSpan) -> DecodeRow:
    return DecodeRow(tail.offset + tail.length - 1, tuple(settled), tail)


def private(shape: AttentionShape, rows: int, keys: int) -> Case:
    """Every row reads a tail of its own."""
    pages = _Pages(rows * -(-keys // shape.page_size), shape.page_size, rows)
    made = tuple(_row((), pages.span(keys, 0, settled=False)) for _ in range(rows))
    name = f"decode, {rows} x {keys} private keys"
    return Case(name, made, (), pages.num_pages, (rows, 1, keys))


def shared(shape: AttentionShape, rows: int, keys: int, *, tail: int = 0, spread: int = 0) -> Case:
    """All rows read one segment, each ``spread`` tokens further on than the row before it, and a
    tail of their own of at least the newest key."""
    own = max(1, tail)
    count = -(-keys // shape.page_size) + rows * -(-own // shape.page_size)
    pages = _Pages(count, shape.page_size, rows)
    segment = pages.span(keys, 0, settled=True)
    made = []
    for n in range(rows):
        at = n * spread
        made.append(_row([_moved(segment, at)], pages.span(own, at + keys, settled=False)))
    where = f"at {rows} offsets" if spread else "at one offset"
    text = f"decode, {rows} rows behind {keys} shared keys {where}, {own} of their own"
    return Case(text, tuple(made), (), count)


def ragged(shape: AttentionShape, rows: int, document: int, seed: int = 0) -> Case:
    """Rows with one to four of eight documents in any order, and tails of any length."""
    rng = random.Random(seed)
    tails = [rng.randint(1, document) for _ in range(rows)]
    size = shape.page_size
    count = 8 * -(-document // size) + sum(-(-t // size) for t in tails)
    pages = _Pages(count, size, seed)
    documents = [pages.span(document - rng.randrange(size), 0, settled=True) for _ in range(8)]
    made = []
    for tail in tails:
        settled, at = [], rng.randrange(64)
        for chosen in rng.sample(documents, rng.randint(1, 4)):
            settled.append(_moved(chosen, at))
            at += chosen.length
        made.append(_row(settled, pages.span(tail, at, settled=False)))
    name = f"decode, ragged: {rows} rows, 1-4 of 8 documents of {document}, private tails"
    return Case(name, tuple(made), (), count)


def several(
    shape: AttentionShape, rows: int, chosen: int, documents: int, length: int, *, tail: int
) -> Case:
    """Rows with ``chosen`` of some documents each, in an order of their own, and tails."""
    rng, size = random.Random(rows), shape.page_size
    count = documents * -(-length // size) + rows * -(-tail // size)
    pages = _Pages(count, size, rows)
    known = [pages.span(length, 0, settled=True) for _ in range(documents)]
    made = []
    for _ in range(rows):
        settled = [_moved(span, n * length) for n, span in enumerate(rng.sample(known, chosen))]
        made.append(_row(settled, pages.span(tail, chosen * length, settled=False)))
    what = f"{chosen} of {documents} documents of {length}, {tail} of their own"
    return Case(f"decode, {rows} rows, {what}", tuple(made), (), count)


def causal(shape: AttentionShape, tokens: int) -> Case:
    """A long prompt."""
    pages = _Pages(-(-tokens // shape.page_size), shape.page_size, tokens)
    chunk = PrefillChunk(range(tokens), (pages.span(tokens, 0, settled=False),))
    name = f"prefill, {tokens} tokens, causal"
    return Case(name, (), (chunk,), pages.num_pages, (1, tokens, tokens), causal=True)


def as_one_span(case: Case) -> Case:
    """The same new tokens behind the same keys, as if all had been encoded in their place: one
    span of whole pages."""
    (chunk,) = case.chunks
    pages = [page for span in chunk.spans for page in span.pages]
    keys = sum(span.length for span in chunk.spans)
    whole = PrefillChunk(chunk.positions, (ReadSpan(pages, 0, keys, 0),))
    return replace(case, chunks=(whole,))


def behind_documents(shape: AttentionShape, tokens: int, documents: int, length: int) -> Case:
    """New tokens behind cached documents."""
    size = shape.page_size
    pages = _Pages(documents * -(-length // size) + -(-tokens // size), size, tokens)
    spans, at = [], 0
    for _ in range(documents):
        spans.append(pages.span(length, at, settled=True))
        at += length
    spans.append(pages.span(tokens, at, settled=False))
    chunk = PrefillChunk(range(at, at + tokens), tuple(spans))
    name = f"prefill, {tokens} tokens behind {documents} cached documents of {length}"
    return Case(name, (), (chunk,), pages.num_pages)
