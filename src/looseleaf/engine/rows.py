"""The rows of a step as the device takes them: tokens, slots, places, and whose logits are wanted.

A token may be *awaited*: the device has it, as row ``r`` of what the step before sampled, and the
host does not know it yet. A negative number stands for it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from looseleaf.engine.scheduler import StepWork
from looseleaf.engine.sequence import Sequence

IntArray = npt.NDArray[np.int64]


def awaited_token(row: int) -> int:
    """What stands for the token that the step before samples for its row ``row``."""
    return -1 - row


def arrived_tokens(
    tokens: Int[Tensor, " rows"], previous: Int[Tensor, " sampled"]
) -> Int[Tensor, " rows"]:
    """``tokens`` with those that were awaited taken from ``previous``."""
    # where nothing is awaited, any row of the other will do
    return torch.where(tokens < 0, previous[(-1 - tokens).clamp_min_(0)], tokens)


@dataclass(frozen=True)
class RowInputs:
    """Token, slot (``page * page_size + slot``) and place in its segment of every row of a step.

    ``table`` is int64 ``[3, rows]``; ``wanted`` lists the rows whose logits are wanted, None for
    all."""

    table: IntArray
    wanted: list[int] | None

    @property
    def num_rows(self) -> int:
        return int(self.table.shape[1])

    def to(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, slots and places on ``device``."""
        table = to_device(torch.from_numpy(self.table), device)
        return table[0], table[1], table[2]

    def wanted_on(self, device: torch.device) -> Tensor:
        """The rows whose logits are wanted, as an index on ``device``."""
        every = range(self.num_rows) if self.wanted is None else self.wanted
        # a step may end no prompt: an empty list alone would be of floats
        return to_device(torch.tensor(every, dtype=torch.int64), device)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy on ``device``, without waiting for what the device still has to do."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


class Arrival(NamedTuple):
    """Sampled tokens on their way to the host."""

    tokens: Tensor
    event: torch.cuda.Event | None

    @classmethod
    def of(cls, token_ids: Int[Tensor, " sampled"]) -> "Arrival":
        """Send ``token_ids`` on their way."""
        if not token_ids.is_cuda:
            return cls(token_ids, None)
        tokens = token_ids.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return cls(tokens, event)

    def wait(self) -> list[int]:
        """The tokens, once they are there."""
        if self.event is not None:
            self.event.synchronize()
        tokens: list[int] = self.tokens.tolist()
        return tokens


def logit_sequences(work: StepWork) -> list[Sequence]:
    """The sequences that get a token from the step, in the order of its logits."""
    return [*work.decode, *(c.sequence for c in work.chunks if c.ends_prompt)]


def step_rows(work: StepWork, page_size: int) -> RowInputs:
    """The rows of ``work``: one for each sequence that decodes, then those of the chunks."""
    tokens = [sequence.tail.tokens[-1] for sequence in work.decode]
    places = [sequence.tail.num_tokens - 1 for sequence in work.decode]
    slots = [
        sequence.tail.pages[place // page_size] * page_size + place % page_size
        for sequence, place in zip(work.decode, places, strict=True)
    ]
    decode = np.array([tokens, slots, places], dtype=np.int64).reshape(3, -1)
    columns = [decode, *(chunk.table(page_size) for chunk in work.chunks)]
    wanted = list(_wanted(work)) if work.chunks else None
    return RowInputs(np.concatenate(columns, axis=1), wanted)


def _wanted(work: StepWork) -> Iterator[int]:
    row = len(work.decode)
    yield from range(row)
    for chunk in work.chunks:
        row += chunk.stop - chunk.start
        if chunk.ends_prompt:
            yield row - 1
