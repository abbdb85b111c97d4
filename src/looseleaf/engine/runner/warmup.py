"""Warmup: a runner captures graphs of usual steps and compiles all kernels before it serves.

A kernel compiles at its first launch, which takes seconds and delays all requests. So a rehearsal
over few layers finds the kernels of all jobs, which then compile together. Warmup uses only padding
rows and free pages, so it changes no cached keys."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from looseleaf.attention.paged import PagedAttention, StepRows
from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.attention.plan.groups import Bitmap, ReadSpan
from looseleaf.blend import Budget, Question
from looseleaf.blend.scoring_graphs import ScoringGraphs
from looseleaf.blend.watched import ChunkStep, Watch
from looseleaf.config import Fuse
from looseleaf.graphs.capture import Captures
from looseleaf.graphs.decode import MAX_ROWS, StepGraphs
from looseleaf.graphs.prefill import PassGraphs, PassKey
from looseleaf.models import Decoder
from looseleaf.models.experts import apply_experts
from looseleaf.models.layers import apply_gated
from looseleaf.ops.dense.likeliest import likeliest
from looseleaf.ops.experts.mlp import rows_of_kernels
from looseleaf.ops.rotate import rotate
from looseleaf.types import Attend, Expand, ExpandingAttend, ScoreRule

# rows of a pass that is too long for a graph, and rows of passes with graphs
_LONG, _SHORT = 1040, (96, 160, 512)
# rows for which matrix products have separate kernels
_OF_PRODUCTS = (128, 144, 160, 192)
# above the largest tile, which has 128 rows and heads
_ROWS_OF_A_PROCESSOR = 160
_DOCUMENTS, _DOCUMENT_TOKENS, _QUESTION = 4, 256, 16
# cached tokens before new rows, and new rows: both determine the number of parts
_CACHED, _NEW = (0, 1024, 4096, 16384), range(8, MAX_ROWS + 1, 8)

Job = Callable[[], None]
Launches = list[Callable[[], Tensor]]


def warming(
    model: Decoder,
    attention: PagedAttention,
    graphs: StepGraphs,
    passes: ScoringGraphs | None,
) -> list[Job]:
    """The jobs of the warmup, in order. Each takes about the same time after compilation."""

    def run(launches: Launches) -> None:
        for launch in launches:
            launch()

    launches = [
        partial(_launch_passes, model, attention, run),
        partial(_launch_products, model, run),
    ]
    return [*launches, *_captures(model, graphs, passes)]


def _captures(model: Decoder, graphs: StepGraphs, passes: ScoringGraphs | None) -> list[Job]:
    """Captures of usual steps and passes."""
    jobs: list[Job] = [partial(graphs.prepare, key) for key in graphs.usual()]
    if passes is not None:
        jobs += _passes(model, passes, graphs.attention.pool.page_size)
    return jobs


def rehearsal(
    model: Decoder, attention: PagedAttention, max_num_seqs: int, *, with_passes: bool
) -> list[Job]:
    """Captures of the warmup over few layers, for their kernels only: nothing is computed."""
    short = model.first_layers(_covering(model, attention.rules))
    graphs = StepGraphs(short, attention, max_num_seqs, rehearsal=True)
    passes = ScoringGraphs(short, attention, rehearsal=True) if with_passes else None
    captures = Captures(model.device, rehearsal=True)
    # the memory of captures ends with its last graph
    kept: list[object] = []

    def capture(launches: Launches) -> None:
        kept.append(captures.capture(lambda within: [launch() for launch in launches][-1]))

    return [
        partial(_start_library, model.device),
        partial(_launch_products, model, capture),
        partial(_launch_passes, short, attention, capture),
        *_captures(short, graphs, passes),
    ]


def _start_library(device: torch.device) -> None:
    """Multiply, because a library that starts during a capture breaks it."""
    ones = torch.ones(16, 16, device=device)
    torch.mm(ones, ones)


def _covering(model: Decoder, rules: Sequence[ScoreRule]) -> int:
    """The number of first layers with every rule and kind of MLP, and one that stands for the last.

    At least two before that one, because the first layer adds nothing pending."""
    mixtures = [layer.router is not None for layer in model.weights.layers]
    kinds = [mixtures.index(kind) + 1 for kind in mixtures]
    return max(2, *(rules.index(rule) + 1 for rule in rules), *kinds) + 1


@dataclass(frozen=True)
class _WholeDepth:
    """A step's attention for the first ``short`` layers, the last of which reads as layer
    ``whole - 1``: the last layer has fewer queries, so its kernels differ."""

    step: Attend
    short: int
    whole: int

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        return self.step(self._layer(layer), q, k, v)

    def num_expanded(self, layer: int) -> int:
        """See `looseleaf.types.ExpandingAttend`."""
        step = self.step
        return step.num_expanded(self._layer(layer)) if isinstance(step, ExpandingAttend) else 0

    def attend_expanded(self, layer: int, q: Tensor, expand: Expand) -> Tensor:
        """See `looseleaf.types.ExpandingAttend`."""
        assert isinstance(self.step, ExpandingAttend), "other steps have no expanded rows"
        return self.step.attend_expanded(self._layer(layer), q, expand)

    def _layer(self, layer: int) -> int:
        return self.whole - 1 if layer == self.short - 1 else layer


@torch.inference_mode()
def _launch_passes(
    model: Decoder, attention: PagedAttention, run: Callable[[Launches], None]
) -> None:
    """``run`` passes without graphs, as for long prompts, with and without replaced tokens.

    The passes fill the device, because shorter ones use another kernel that reads in parts."""
    pool, device = attention.pool, model.device
    on_gpu, cuda = device.type == "cuda", torch.cuda
    processors = cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
    filling = -(-_ROWS_OF_A_PROCESSOR * processors // model.config.num_qo_heads)
    longest = pool.num_free * pool.page_size, attention.num_positions
    pages = pool.allocate(min(max(_LONG, filling), *longest) // pool.page_size) or []
    rows = len(pages) * pool.page_size
    if not rows:
        return
    try:
        at = torch.arange(rows, device=device)
        slots = torch.tensor(pages, device=device)[at // pool.page_size] * pool.page_size
        whole, again = ReadSpan(pages, 0, rows, 0), np.arange(1, rows, 2)
        patch = ReadSpan(pages[: -(-len(again) // pool.page_size)], 0, len(again), 0, places=again)
        pool.set_positions(patch.pages, again)
        last_row, tokens = torch.tensor([rows - 1], device=device), at % model.config.vocab_size
        slots += at % pool.page_size
        replaced = replace(whole, hidden=_bitmap(again, rows)), patch

        def read(step: Attend) -> Tensor:
            attend = _WholeDepth(step, model.num_layers, len(attention.rules))
            return likeliest(model.logits(model.forward(tokens, attend, last_rows=last_row)))

        launches: Launches = []
        expanding = (False,) if attention.latent is None else (False, True)
        for spans, expands in product(((whole,), replaced), expanding):
            chunk = PrefillChunk(range(rows), spans)
            step = StepRows([], [chunk], slots, at, [rows - 1], expands=expands)
            launches.append(partial(read, attention.step(step)))
        if on_gpu:
            numbers = [rows, min(rows, _SHORT[0])]
            launches += _span_launches(attention, numbers, ((whole,), replaced), slots)
        shape = model.config.num_kv_heads, model.config.head_dim
        keys = torch.zeros(rows, *shape, dtype=model.dtype, device=device)
        launches.append(partial(rotate, keys, at, attention.rotations[0]))
        run(launches)
    finally:
        pool.free(pages)


@torch.inference_mode()
def _launch_products(model: Decoder, run: Callable[[Launches], None]) -> None:
    """``run`` the matrix products whose kernel depends on the number of rows."""
    config, law, device = model.config, model.config.experts, model.device
    if device.type != "cuda":
        return

    def normed(rows: int) -> Tensor:
        return torch.zeros(rows, config.hidden_size, dtype=model.dtype, device=device)

    for layer in {layer.router is None: layer for layer in model.weights.layers}.values():
        if layer.router is None:
            gate_up = layer.gate_up
            run([partial(apply_gated, normed(rows), gate_up, config) for rows in _OF_PRODUCTS])
        elif law is not None:
            of_experts = rows_of_kernels(law.num_slots, law.num_stored)
            run([partial(apply_experts, normed(rows), layer, config) for rows in of_experts])


def _span_launches(
    attention: PagedAttention,
    numbers: Sequence[int],
    variants: Sequence[tuple[ReadSpan, ...]],
    slots: torch.Tensor,
) -> Launches:
    """All variants of span reads: in place or gathered, one group or two, whole or in parts."""
    planner, kv, total = attention.planner, attention.pool.kv, len(slots)
    ways = [(False, 2), (True, 2)] if planner.gathering else [(False, 2)]
    ways += [(False, 1)] if planner.costs.one_group and not planner.batch_invariant else []
    like = kv.new_empty(0, dtype=attention.row_dtype or kv.dtype)

    def read(step: ChunkStep, q: Tensor, k: Tensor) -> Tensor:
        return step.state(0, q, k, k).out

    launches: Launches = []
    for rows in numbers:
        q = like.new_zeros((rows, attention.num_qo_heads, kv.shape[5]))
        k = like.new_zeros((rows, kv.shape[3], kv.shape[5]))
        at = torch.arange(total - rows, total, device=kv.device)
        for spans in variants:
            chunk = PrefillChunk(range(total - rows, total), spans)
            for gather, groups in ways:
                listed = planner.span_list([chunk], gather=gather, groups=groups)
                step = ChunkStep(attention, listed, slots[-rows:], at)
                launches.append(partial(read, step, q, k))
    return launches


def _passes(model: Decoder, passes: ScoringGraphs, page_size: int) -> list[Job]:
    """Captures of passes that blend, wait for loads, read cached text, or score tokens."""
    depth = model.num_layers
    question = _pass(0, page_size)
    spans = question.spans[:_DOCUMENTS]
    starts = [_DOCUMENTS * _DOCUMENT_TOKENS] * _QUESTION
    usual = Question(Budget(ratio=0.0), Fuse("question", ratio=0.0).watched_share)
    layers = [layer for layer in range(depth) if usual.watches(layer, depth)]
    watch = Watch([spans], layers, torch.ones(_QUESTION), starts)
    blending = [[_pass(n - _QUESTION, page_size)] for n in _SHORT]
    keys = [passes.key_of(chunks) for chunks in ([question], *blending)] + usual_passes(
        passes, page_size
    )
    return [
        *(partial(passes.prepare, key) for key in dict.fromkeys(keys)),
        partial(passes.prepare_watched, [question], watch, depth),
    ]


def usual_passes(passes: PassGraphs, page_size: int) -> list[PassKey]:
    """The keys of passes of few new rows after cached text."""
    behind = [[_behind(cached, rows, page_size)] for rows in _NEW for cached in _CACHED]
    return list(dict.fromkeys(passes.key_of(chunks) for chunks in behind if passes.sooner(chunks)))


def _behind(cached: int, rows: int, page_size: int) -> PrefillChunk:
    """``rows`` new rows after ``cached`` tokens."""
    count = cached // page_size
    own = range(count, count - (-rows // page_size))
    before = (ReadSpan(range(count), 0, cached, count),) if cached else ()
    return PrefillChunk(range(cached, cached + rows), (*before, ReadSpan(own, cached, rows, 0)))


def _pass(num_again: int, page_size: int) -> PrefillChunk:
    """A question after documents, of which ``num_again`` tokens are computed again."""
    length, pages = _DOCUMENT_TOKENS, _DOCUMENT_TOKENS // page_size
    total = _DOCUMENTS * length
    again = np.linspace(0, total - 1, num_again).astype(np.int64)
    spans = []
    for start in range(0, total, length):
        places = again[(again >= start) & (again < start + length)] - start
        bitmap = _bitmap(places, length) if num_again else None
        spans.append(ReadSpan(range(pages), start, length, pages, bitmap))
    spans.append(ReadSpan(range(-(-_QUESTION // page_size)), total, _QUESTION, 0))
    if num_again:
        spans.append(ReadSpan(range(-(-num_again // page_size)), 0, num_again, 0, places=again))
    own = np.arange(total, total + _QUESTION)
    return PrefillChunk(np.concatenate([again, own]), tuple(spans))


def _bitmap(places: npt.NDArray[np.int64], length: int) -> Bitmap:
    hidden = np.zeros(-(-length // 32) * 32, dtype=np.bool_)
    hidden[places] = True
    return np.packbits(hidden, bitorder="little").view("<i4")
