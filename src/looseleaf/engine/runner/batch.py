"""The row table of a step: tokens, slots, offsets and logit rows.

A token may be *awaited*: the previous step sampled it on the device, and the host has no copy yet.
A negative number is its placeholder."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from looseleaf.engine.scheduler import StepWork
from looseleaf.engine.sequence import Sequence
from looseleaf.graphs.rows import RowInputs, join_tables, to_device


class Arrival(NamedTuple):
    """Sampled tokens that are copied to the host."""

    tokens: Tensor
    event: torch.cuda.Event | None

    @classmethod
    def of(cls, token_ids: Int[Tensor, " sampled"]) -> "Arrival":
        """Start the copy of ``token_ids``."""
        if not token_ids.is_cuda:
            return cls(token_ids, None)
        tokens = token_ids.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return cls(tokens, event)

    def wait(self) -> list[int]:
        """The tokens, after the copy has ended."""
        if self.event is not None:
            self.event.synchronize()
        tokens: list[int] = self.tokens.tolist()
        return tokens


def logit_sequences(work: StepWork) -> list[Sequence]:
    """The sequences of the step's logits, in order."""
    if not work.chunks:
        return work.decode
    return [*work.decode, *(c.sequence for c in work.chunks if c.ends_prompt)]


def drawing_rows(work: StepWork, logits: Tensor) -> tuple[list[Sequence], Tensor]:
    """The sequences that sample a token from the step, and their logits.

    Sequences that replay already have their next token."""
    sequences = logit_sequences(work)
    rows = [row for row, sequence in enumerate(sequences) if not sequence.replay]
    if len(rows) == len(sequences):
        return sequences, logits
    index = to_device(torch.tensor(rows, dtype=torch.int64), logits.device)
    return [sequences[row] for row in rows], logits.index_select(0, index)


def step_rows(work: StepWork, page_size: int, num_past: Seq[int]) -> RowInputs:
    """The rows of ``work``: one for each decoding sequence, then ``num_past`` revised rows of each,
    then the rows of the chunks."""
    decode = [_tail_row(sequence, 0, page_size) for sequence in work.decode]
    if num_past:
        decode += [
            _tail_row(sequence, age, page_size)
            for sequence, past in zip(work.decode, num_past, strict=True)
            for age in range(1, past + 1)
        ]
    table = np.array(decode, dtype=np.int64).reshape(-1, 3).T
    if not work.chunks and not num_past:
        return RowInputs(np.ascontiguousarray(table), None)
    tables = [table, *(chunk.table(page_size) for chunk in work.chunks)]
    past = range(len(work.decode), len(decode))
    return RowInputs(join_tables(tables), list(_logit_rows(work, len(decode))), past)


def _tail_row(sequence: Sequence, age: int, page_size: int) -> tuple[int, int, int]:
    """Token, slot and offset of the token ``age`` tokens before the newest."""
    tail = sequence.tail
    offset = len(tail.tokens) - 1 - age
    stored = offset - sequence.num_evicted
    slot = tail.pages[stored // page_size] * page_size + stored % page_size
    return tail.tokens[offset], slot, offset


def _logit_rows(work: StepWork, row: int) -> Iterator[int]:
    """The logit rows of the step; ``row`` is the first row of the chunks."""
    yield from range(len(work.decode))
    for chunk in work.chunks:
        row += chunk.stop - chunk.start
        if chunk.ends_prompt:
            yield row - 1
