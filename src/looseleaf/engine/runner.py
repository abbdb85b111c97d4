"""Runs a step on the device: from scheduled work to tensors, through the model, to logits.

The only part of the engine that touches tensors besides the sampler. Host work is done once a step;
the layers share it."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.attention.paged import PagedAttention, StepRows
from looseleaf.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from looseleaf.engine.scheduler import StepWork
from looseleaf.engine.sequence import Chunk, Sequence
from looseleaf.errors import InvalidOption
from looseleaf.kv.pool import PagePool
from looseleaf.models import Decoder
from looseleaf.ops.dispatch import Implementation
from looseleaf.rope.frames import build_rotation, softmax_scale
from looseleaf.types import ScoreRule

_GIB = 1 << 30


@dataclass(frozen=True)
class Runner:
    """A model with its pool and attention on one device."""

    model: Decoder
    pool: PagePool
    attention: PagedAttention

    @classmethod
    def create(
        cls,
        model: Decoder,
        config: EngineConfig,
        max_model_len: int,
        implementation: Implementation = "auto",
    ) -> "Runner":
        """A runner whose pool has the size that ``config.cache`` asks for, or what fits the
        device.
        """
        shape = model.config
        pool = PagePool(
            num_pages=_pool_pages(config.cache, config.scheduler, model, max_model_len),
            page_size=config.cache.page_size,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=model.dtype,
            device=model.device,
        )
        attention = PagedAttention(
            pool=pool,
            rotation=build_rotation(shape.rope, max_model_len, model.device),
            rules=_score_rules(shape),
            num_qo_heads=shape.num_qo_heads,
            grouping=config.scheduler.grouping,
            implementation=implementation,
        )
        return cls(model, pool, attention)

    @torch.inference_mode()
    def run(self, work: StepWork) -> Float[Tensor, "rows vocab_size"]:
        """Compute a step. The logits are of the decode rows, then of chunks that end a prompt."""
        tokens, slots, frame_positions = self._rows(work)
        decode = [sequence.decode_row() for sequence in work.decode]
        chunks = [chunk.prefill() for chunk in work.chunks]
        attend = self.attention.step(StepRows(decode, chunks, slots, frame_positions))
        hidden = self.model.forward(tokens, attend)
        wanted = _logit_rows(work)
        if wanted is not None:
            # a step may end no prompt: an empty list alone would be of floats
            rows = torch.tensor(wanted, dtype=torch.int64, device=hidden.device)
            hidden = hidden.index_select(0, rows)
        return self.model.logits(hidden)

    def _rows(self, work: StepWork) -> tuple[Tensor, Tensor, Tensor]:
        """Token, slot and frame position of every row of the step."""
        page_size = self.pool.page_size
        tokens = [sequence.tail.tokens[-1] for sequence in work.decode]
        places = [sequence.tail.num_tokens - 1 for sequence in work.decode]
        slots = [
            sequence.tail.pages[place // page_size] * page_size + place % page_size
            for sequence, place in zip(work.decode, places, strict=True)
        ]
        rows = np.array([tokens, slots, places], dtype=np.int64).reshape(3, -1)
        columns = [rows, *(_chunk_rows(chunk, page_size) for chunk in work.chunks)]
        everything = torch.from_numpy(np.concatenate(columns, axis=1)).to(self.model.device)
        return everything[0], everything[1], everything[2]


def _chunk_rows(chunk: Chunk, page_size: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    places = np.arange(chunk.start, chunk.stop)
    pages = np.asarray(chunk.target.write_pages)[places // page_size]
    return np.stack([np.asarray(chunk.tokens()), pages * page_size + places % page_size, places])


def ends_prompt(chunk: Chunk) -> bool:
    """Whether the chunk's last row yields the next token's logits."""
    return chunk.target is chunk.sequence.tail and chunk.stop == chunk.target.num_tokens


def logit_sequences(work: StepWork) -> list[Sequence]:
    """The sequences whose logits `Runner.run` returns, in order."""
    return [*work.decode, *(c.sequence for c in work.chunks if ends_prompt(c))]


def _logit_rows(work: StepWork) -> Rows[int] | None:
    """Rows whose logits are wanted, None for all."""
    if not work.chunks:
        return None
    wanted = list(range(len(work.decode)))
    row = len(work.decode)
    for chunk in work.chunks:
        row += chunk.stop - chunk.start
        if ends_prompt(chunk):
            wanted.append(row - 1)
    return wanted


def _score_rules(shape: ModelConfig) -> tuple[ScoreRule, ...]:
    scale = softmax_scale(shape.rope)
    return tuple(
        ScoreRule(scale, soft_cap=shape.soft_cap, window=shape.window(layer))
        for layer in range(shape.num_layers)
    )


def _pool_pages(
    cache: CacheConfig, scheduler: SchedulerConfig, model: Decoder, max_model_len: int
) -> int:
    if cache.num_pages is not None:
        return cache.num_pages
    shape = model.config
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * model.dtype.itemsize
    per_page = per_token * cache.page_size
    if cache.memory_gib is not None:
        pages = int(cache.memory_gib * _GIB) // per_page
        if pages == 0:
            raise InvalidOption(
                f"memory_gib={cache.memory_gib} does not hold a page of {per_page} bytes: raise it"
            )
        return pages
    # never more than all sequences at full length could use, twice over for idle documents
    most = 2 * scheduler.max_num_seqs * -(-max_model_len // cache.page_size)
    return max(1, min(most, _spare_bytes(model.device) // per_page))


def _spare_bytes(device: torch.device) -> int:
    """What a pool may take when nobody said: most of a GPU's free memory, a quarter of the
    machine's.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.85)
    import psutil

    return int(psutil.virtual_memory().available * 0.25)
