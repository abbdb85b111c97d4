"""The peers of ``bench attention``: attention of PyTorch and of FlashInfer.

FlashInfer reads the same pages in the same order, without frames. Its queries count as rotated, so
its answer must equal that of our kernels without frames. PyTorch reads no pages; it gets a dense
rectangle for cases that have one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from looseleaf.attention.plan.groups import ReadSpan
from looseleaf_lab.bench.attention_cases import AttentionShape, Case

Layer = tuple[Tensor, Tensor]
# recommended by FlashInfer
_WORKSPACE_BYTES = 256 << 20
_SDPA = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


class PeerUnavailable(Exception):
    """A peer does not support a case; the message is the reason."""


@dataclass(frozen=True)
class Peer:
    """Another implementation: ``attend(layer)`` returns its attention over one layer's pages.

    A ``dense`` peer reads a rectangle of its own, so its answer is not compared."""

    name: str
    attend: Callable[[Layer], Tensor]
    dense: bool


def peers_of(
    case: Case, shape: AttentionShape, q: Tensor, on_missing: Callable[[str], None]
) -> Iterator[Peer]:
    """The peers that support ``case``; ``on_missing`` gets the reason for each of the others."""
    for name, prepare in (*_dense(case), *_paged(case)):
        try:
            yield Peer(name, prepare(case, shape, q), name.startswith("torch"))
        except PeerUnavailable as reason:
            on_missing(f"{case.name}, {name}: skipped, {reason}")


Make = Callable[[Case, AttentionShape, Tensor], Callable[[Layer], Tensor]]


def _dense(case: Case) -> list[tuple[str, Make]]:
    if case.dense is None:
        return []
    backends = [(f"torch sdpa, {name}", _sdpa(backend)) for name, backend in _SDPA.items()]
    # compiled for every size, so only for cases where it may be the fastest
    return [*backends, ("torch flex", _flex)] if case.causal else backends


def _paged(case: Case) -> list[tuple[str, Make]]:
    if case.chunks:
        spans = [span for chunk in case.chunks for span in chunk.spans]
        kinds: list[tuple[str, Make]] = [
            (f"flashinfer paged prefill, {backend}", _flashinfer_prefill(backend))
            for backend in ("fa2", "fa3")
        ]
        if len(spans) == 1:
            kinds += [
                (f"flashinfer ragged prefill, {backend}", _flashinfer_ragged(backend))
                for backend in ("fa2", "fa3")
            ]
        return kinds
    kinds = [
        ("flashinfer decode", _flashinfer_decode(False)),
        ("flashinfer decode, tensor cores", _flashinfer_decode(True)),
    ]
    if _common_prefix(case) is not None:
        kinds.append(("flashinfer cascade", _flashinfer_cascade))
    return kinds


def _sdpa(backend: SDPBackend) -> Make:
    def make(case: Case, shape: AttentionShape, q: Tensor) -> Callable[[Layer], Tensor]:
        if backend is SDPBackend.CUDNN_ATTENTION and not q.is_cuda:
            raise PeerUnavailable("cuDNN needs a GPU")
        rectangle = _rectangle(case, shape, q)

        def attend(layer: Layer) -> Tensor:
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(
                    *rectangle, is_causal=case.causal, enable_gqa=True
                )

        return _checked(attend)

    return make


def _flex(case: Case, shape: AttentionShape, q: Tensor) -> Callable[[Layer], Tensor]:
    if not q.is_cuda:
        raise PeerUnavailable("compiled for GPUs only")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rectangle = _rectangle(case, shape, q)
    _, rows, keys = case.dense or (0, 0, 0)

    def is_seen(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return row >= key

    mask = create_block_mask(is_seen, None, None, rows, keys, device=str(q.device))
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def attend(layer: Layer) -> Tensor:
        out: Tensor = compiled(*rectangle, block_mask=mask, enable_gqa=True)
        return out

    return _checked(attend)


def _rectangle(case: Case, shape: AttentionShape, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values ``[batch, heads, length, head_dim]``."""
    assert case.dense is not None, "a case with one rectangle"
    batch, rows, keys = case.dense

    def normal(heads: int, length: int) -> Tensor:
        size = (batch, heads, length, shape.head_dim)
        return torch.randn(size, device=q.device, dtype=torch.float32).to(shape.dtype)

    return (
        normal(shape.num_qo_heads, rows),
        normal(shape.num_kv_heads, keys),
        normal(shape.num_kv_heads, keys),
    )


def _checked(attend: Callable[[Layer], Tensor]) -> Callable[[Layer], Tensor]:
    """``attend`` after a first call; raises PeerUnavailable if that call fails."""
    try:
        attend((torch.empty(0), torch.empty(0)))
    except Exception as error:
        raise PeerUnavailable(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    return attend


def _flashinfer(q: Tensor) -> Any:
    """The flashinfer package. Raises PeerUnavailable if it is missing or has no GPU."""
    if find_spec("flashinfer") is None:
        raise PeerUnavailable("flashinfer is not installed (pip install flashinfer-python)")
    if not q.is_cuda:
        raise PeerUnavailable("flashinfer needs a GPU")
    return import_module("flashinfer")


def _tables(
    spans_of: Sequence[Sequence[ReadSpan]], page_size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Page prefix sums, pages, and lengths of last pages of rows that read several spans.

    Raises PeerUnavailable for a partly filled page before the last one."""
    indptr, indices, last = [0], list[int](), list[int]()
    for spans in spans_of:
        if any(span.length % page_size for span in spans[:-1]):
            raise PeerUnavailable("its page table has no partly filled page except the last")
        pages = [page for span in spans for page in span.pages]
        indices += pages
        indptr.append(len(indices))
        last.append((spans[-1].length - 1) % page_size + 1)
    tensors = (torch.tensor(x, dtype=torch.int32, device=device) for x in (indptr, indices, last))
    first, second, third = tensors
    return first, second, third


def _heads(shape: AttentionShape) -> tuple[int, int, int, int]:
    return shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, shape.page_size


def _workspace(q: Tensor) -> Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)


def _flashinfer_decode(tensor_cores: bool) -> Make:
    def make(case: Case, shape: AttentionShape, q: Tensor) -> Callable[[Layer], Tensor]:
        package = _flashinfer(q)
        spans = [(*row.settled, row.tail) for row in case.rows]
        tables = _tables(spans, shape.page_size, q.device)
        # fa3 decodes at a quarter of the speed of fa2
        wrapper = package.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(q), "HND", use_tensor_cores=tensor_cores, backend="fa2"
        )
        wrapper.plan(*tables, *_heads(shape), q_data_type=shape.dtype, kv_data_type=shape.dtype)
        return lambda layer: wrapper.run(q, layer)

    return make


def _common_prefix(case: Case) -> ReadSpan | None:
    """The only span that every row of ``case`` reads before its tail, else None."""
    if len(case.rows) < 2 or any(len(row.settled) != 1 for row in case.rows):
        return None
    first = case.rows[0].settled[0]
    same = all(row.settled[0].pages == first.pages for row in case.rows)
    return first if same else None


def _flashinfer_cascade(case: Case, shape: AttentionShape, q: Tensor) -> Callable[[Layer], Tensor]:
    package, prefix = _flashinfer(q), _common_prefix(case)
    assert prefix is not None, "rows without a common prefix"
    rows = len(case.rows)
    shared = _tables([[prefix]], shape.page_size, q.device)
    tails = _tables([[row.tail] for row in case.rows], shape.page_size, q.device)
    wrapper = package.MultiLevelCascadeAttentionWrapper(2, _workspace(q), "HND")
    queries = [
        torch.tensor([0, rows], dtype=torch.int32, device=q.device),
        torch.arange(rows + 1, dtype=torch.int32, device=q.device),
    ]
    levels = (
        [first_level, second_level] for first_level, second_level in zip(shared, tails, strict=True)
    )
    wrapper.plan(queries, *levels, *_heads(shape), q_data_type=shape.dtype)
    return lambda layer: wrapper.run(q, layer)


def _flashinfer_prefill(backend: str) -> Make:
    def make(case: Case, shape: AttentionShape, q: Tensor) -> Callable[[Layer], Tensor]:
        package = _flashinfer(q)
        tables = _tables([chunk.spans for chunk in case.chunks], shape.page_size, q.device)
        counts = [0]
        for chunk in case.chunks:
            counts.append(counts[-1] + len(chunk.positions))
        rows = torch.tensor(counts, dtype=torch.int32, device=q.device)
        wrapper = package.BatchPrefillWithPagedKVCacheWrapper(_workspace(q), "HND", backend=backend)
        wrapper.plan(rows, *tables, *_heads(shape), causal=True, q_data_type=shape.dtype)
        return lambda layer: wrapper.run(q, layer)

    return make


def _flashinfer_ragged(backend: str) -> Make:
    def make(case: Case, shape: AttentionShape, q: Tensor) -> Callable[[Layer], Tensor]:
        package = _flashinfer(q)
        (span,) = case.chunks[0].spans
        ends = torch.tensor([0, span.length], dtype=torch.int32, device=q.device)
        wrapper = package.BatchPrefillWithRaggedKVCacheWrapper(
            _workspace(q), "NHD", backend=backend
        )
        wrapper.plan(ends, ends, *_heads(shape)[:3], causal=True, q_data_type=shape.dtype)
        pages = torch.tensor(list(span.pages), device=q.device)
        gathered: dict[int, Layer] = {}  # by the address of the pages

        def attend(layer: Layer) -> Tensor:
            # contiguous keys, gathered once and outside the timing
            address = layer[0].data_ptr()
            if address not in gathered:
                k, v = (
                    side[pages].transpose(1, 2).flatten(0, 1)[: span.length].contiguous()
                    for side in layer
                )
                gathered[address] = k, v
            out: Tensor = wrapper.run(q, *gathered[address])
            return out

        return attend

    return make
