"""The cases of ``bench attention``: batches of decode rows and prefill chunks, in the form that the
engine plans, with their minimal work."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.attention.plan.groups import DecodeRow, ReadSpan
from looseleaf.config import LatentConfig, ModelConfig


@dataclass(frozen=True)
class AttentionShape:
    """Heads and pages of the measured model; ``layers`` pools alternate, so that no layer's keys
    are in a cache.

    With the sizes of ``latent`` keys, their dims that do not rotate are the values."""

    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    layers: int = 3
    dtype: torch.dtype = torch.bfloat16
    latent: LatentConfig | None = None

    @classmethod
    def of(cls, model: ModelConfig, layers: int = 3) -> "AttentionShape":
        """The heads of ``model``, in its dtype."""
        return cls(
            model.num_qo_heads,
            model.num_kv_heads,
            model.head_dim,
            layers=layers,
            dtype=getattr(torch, model.torch_dtype),
            latent=model.latent,
        )

    @property
    def latent_rope(self) -> int:
        """The rotated dims of a latent key; 0 for other keys."""
        return 0 if self.latent is None else self.latent.rope_dim

    @property
    def planes(self) -> int:
        """Vectors that a KV head stores of a key."""
        return 1 if self.latent_rope else 2

    @property
    def bytes_per_key(self) -> int:
        """K and V of all KV heads of one layer."""
        return self.planes * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def flops_per_pair(self) -> int:
        """Both products of one row and one key, over all heads."""
        return 2 * self.num_qo_heads * (2 * self.head_dim - self.latent_rope)


@dataclass(frozen=True)
class Case:
    """Rows and chunks of one step over a pool of ``num_pages`` pages.

    ``dense`` is the rectangle ``(batch, rows, keys)`` of a peer without pages, or None if such a
    peer would have to copy or pad.
    """

    name: str
    rows: tuple[DecodeRow, ...]
    chunks: tuple[PrefillChunk, ...]
    num_pages: int
    dense: tuple[int, int, int] | None = None
    causal: bool = False

    def pairs(self) -> int:
        """Number of visible pairs of a row and a key."""
        decode = sum(span.length for row in self.rows for span in (*row.settled, row.tail))
        return decode + sum(
            max(0, min(span.length, position - span.offset + 1))
            for chunk in self.chunks
            for span in chunk.spans
            for position in chunk.positions
        )

    def distinct_keys(self, page_size: int) -> int:
        """Number of distinct keys, counted in whole pages."""
        pages = {p for row in self.rows for s in (*row.settled, row.tail) for p in s.pages}
        pages |= {p for chunk in self.chunks for span in chunk.spans for p in span.pages}
        return len(pages) * page_size

    @property
    def num_rows(self) -> int:
        return len(self.rows) + sum(len(chunk.positions) for chunk in self.chunks)

    @property
    def longest(self) -> int:
        """Length of the rotation table."""
        last = [row.position for row in self.rows]
        return 1 + max([*last, *(chunk.positions[-1] for chunk in self.chunks)])


class _Pages:
    """Allocates the pages of a pool in random order, as in a used pool."""

    def __init__(self, num_pages: int, page_size: int, seed: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages))
        random.Random(seed).shuffle(self._free)

    def span(self, length: int, offset: int, *, settled: bool) -> ReadSpan:
        """A span of ``length`` keys with pages of its own."""
        count = -(-length // self.page_size)
        pages = [self._free.pop() for _ in range(count)]
        return ReadSpan(pages, offset, length, count if settled else 0)


def _at_offset(span: ReadSpan, offset: int) -> ReadSpan:
    """The same pages at another offset."""
    return ReadSpan(span.pages, offset, span.length, span.sharable)


def _row(settled: Sequence[ReadSpan], tail: ReadSpan) -> DecodeRow:
    return DecodeRow(tail.offset + tail.length - 1, tuple(settled), tail)


def private(shape: AttentionShape, rows: int, keys: int) -> Case:
    """Decode rows, each with a private tail."""
    pages = _Pages(rows * -(-keys // shape.page_size), shape.page_size, rows)
    decode_rows = tuple(_row((), pages.span(keys, 0, settled=False)) for _ in range(rows))
    name = f"decode, {rows} x {keys} private keys"
    return Case(name, decode_rows, (), pages.num_pages, (rows, 1, keys))


def shared(shape: AttentionShape, rows: int, keys: int, *, tail: int = 0, spread: int = 0) -> Case:
    """Decode rows that all read one segment and a private tail of at least the newest key.

    The segment's offset grows by ``spread`` tokens from row to row."""
    tail_length = max(1, tail)
    count = -(-keys // shape.page_size) + rows * -(-tail_length // shape.page_size)
    pages = _Pages(count, shape.page_size, rows)
    segment = pages.span(keys, 0, settled=True)
    decode_rows = []
    for n in range(rows):
        offset = n * spread
        decode_rows.append(
            _row(
                [_at_offset(segment, offset)], pages.span(tail_length, offset + keys, settled=False)
            )
        )
    offsets_label = f"at {rows} offsets" if spread else "at one offset"
    name = (
        f"decode, {rows} rows behind {keys} shared keys {offsets_label}, {tail_length} of their own"
    )
    return Case(name, tuple(decode_rows), (), count)


def ragged(shape: AttentionShape, rows: int, document: int, seed: int = 0) -> Case:
    """Decode rows with one to four of eight documents in random order, and ragged tails."""
    rng = random.Random(seed)
    tails = [rng.randint(1, document) for _ in range(rows)]
    size = shape.page_size
    count = 8 * -(-document // size) + sum(-(-t // size) for t in tails)
    pages = _Pages(count, size, seed)
    documents = [pages.span(document - rng.randrange(size), 0, settled=True) for _ in range(8)]
    decode_rows = []
    for tail in tails:
        settled, offset = [], rng.randrange(64)
        for span in rng.sample(documents, rng.randint(1, 4)):
            settled.append(_at_offset(span, offset))
            offset += span.length
        decode_rows.append(_row(settled, pages.span(tail, offset, settled=False)))
    name = f"decode, ragged: {rows} rows, 1-4 of 8 documents of {document}, private tails"
    return Case(name, tuple(decode_rows), (), count)


def document_subsets(
    shape: AttentionShape, rows: int, per_row: int, documents: int, length: int, *, tail: int
) -> Case:
    """Decode rows with ``per_row`` of ``documents`` each, in random order, and tails."""
    rng, size = random.Random(rows), shape.page_size
    count = documents * -(-length // size) + rows * -(-tail // size)
    pages = _Pages(count, size, rows)
    spans = [pages.span(length, 0, settled=True) for _ in range(documents)]
    decode_rows = []
    for _ in range(rows):
        settled = [
            _at_offset(span, n * length) for n, span in enumerate(rng.sample(spans, per_row))
        ]
        decode_rows.append(_row(settled, pages.span(tail, per_row * length, settled=False)))
    documents_label = f"{per_row} of {documents} documents of {length}, {tail} of their own"
    return Case(f"decode, {rows} rows, {documents_label}", tuple(decode_rows), (), count)


def causal(shape: AttentionShape, tokens: int) -> Case:
    """A long prompt without documents."""
    pages = _Pages(-(-tokens // shape.page_size), shape.page_size, tokens)
    chunk = PrefillChunk(range(tokens), (pages.span(tokens, 0, settled=False),))
    name = f"prefill, {tokens} tokens, causal"
    return Case(name, (), (chunk,), pages.num_pages, (1, tokens, tokens), causal=True)


def as_one_span(case: Case) -> Case:
    """The same new tokens and keys with all keys in one span of whole pages, as if encoded in
    place."""
    (chunk,) = case.chunks
    pages = [page for span in chunk.spans for page in span.pages]
    keys = sum(span.length for span in chunk.spans)
    one_chunk = PrefillChunk(chunk.positions, (ReadSpan(pages, 0, keys, 0),))
    return replace(case, chunks=(one_chunk,))


def after_documents(shape: AttentionShape, tokens: int, documents: int, length: int) -> Case:
    """New tokens after cached documents."""
    size = shape.page_size
    pages = _Pages(documents * -(-length // size) + -(-tokens // size), size, tokens)
    spans, offset = [], 0
    for _ in range(documents):
        spans.append(pages.span(length, offset, settled=True))
        offset += length
    spans.append(pages.span(tokens, offset, settled=False))
    chunk = PrefillChunk(range(offset, offset + tokens), tuple(spans))
    name = f"prefill, {tokens} tokens behind {documents} cached documents of {length}"
    return Case(name, (), (chunk,), pages.num_pages)
