"""Sampling of a step: its logits, one batch of all outputs, or one output at a time after a fault.

A fault then ends only the request that causes it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.engine.progress import OutputProgress
from looseleaf.engine.sampling.sampler import SampledTokens, Sampler
from looseleaf.engine.sampling.state import SamplingBatch
from looseleaf.engine.scheduler import StepWork
from looseleaf.engine.sequence import Sequence
from looseleaf.graphs.rows import to_device
from looseleaf.kv.pool import PagePool
from looseleaf.parallel import Ranks

OnFault = Callable[[OutputProgress, Exception], None]


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

    Sequences that replay already have their next token, and some end with their prompt."""
    sequences = logit_sequences(work)
    rows = [row for row, sequence in enumerate(sequences) if sequence.draws and not sequence.replay]
    if len(rows) == len(sequences):
        return sequences, logits
    index = to_device(torch.tensor(rows, dtype=torch.int64), logits.device)
    return [sequences[row] for row in rows], logits.index_select(0, index)


def plan_of(work: StepWork, pool: PagePool) -> str:
    """A digest of a step, which is the same on all ranks."""
    chunks = [(chunk.start, chunk.stop) for chunk in work.chunks]
    return f"{pool.num_freed} {pool.num_free} {len(work.decode)} {chunks}"


@dataclass(frozen=True)
class Draw:
    """Tokens for ``outputs``, in the order of ``sampled``; ``arrival`` copies them to the host."""

    outputs: list[OutputProgress]
    sampled: SampledTokens
    arrival: Arrival


@dataclass(frozen=True)
class InFlightStep:
    """A launched step and its sampled tokens."""

    work: StepWork
    draws: list[Draw]


@dataclass(eq=False)
class Drawing:
    """Samples steps. Consecutive steps of the same outputs share one sampling batch.

    With ``ranks`` only rank 0 samples, and sends the tokens."""

    device: torch.device
    ranks: Ranks | None = None
    _sampler: Sampler = field(default_factory=Sampler)
    _outputs: list[OutputProgress] = field(default_factory=list)
    _batch: SamplingBatch | None = None

    def draw(
        self,
        outputs: list[OutputProgress],
        logits: Float[Tensor, "outputs vocab_size"],
        on_fault: OnFault,
        plan: str = "",
    ) -> list[Draw]:
        """The next token of every output. ``on_fault`` is called with each output that fails, and
        ends it. Raises EngineFault for ranks whose ``plan`` of the step differs."""
        if plan and self.ranks is not None:
            return self._draw_on_ranks(outputs, logits, on_fault, plan, self.ranks)
        try:
            sampled = self._sampler.sample(logits, self._batch_of(outputs))
            return [Draw(outputs, sampled, Arrival.of(sampled.token_ids))]
        except Exception as error:
            self._batch = None
            if len(outputs) == 1:
                on_fault(outputs[0], error)
                return []
        # a failed batch has changed no state, so each output can be sampled separately
        return [
            draw
            for row, output in enumerate(outputs)
            # a sibling's fault may have ended it
            if not output.finished
            for draw in self.draw([output], logits[row : row + 1], on_fault)
        ]

    def _draw_on_ranks(
        self,
        outputs: list[OutputProgress],
        logits: Float[Tensor, "outputs vocab_size"],
        on_fault: OnFault,
        plan: str,
        ranks: Ranks,
    ) -> list[Draw]:
        """`draw` on rank 0, for all ranks."""
        faults = list[tuple[int, Exception]]()

        def note(output: OutputProgress, error: Exception) -> None:
            faults.append((outputs.index(output), error))

        draws = self.draw(outputs, logits, note) if ranks.link.is_first else []
        separate = None
        if faults or len(draws) > 1:
            # after a fault each output is drawn separately
            separate = [[outputs.index(output) for output in draw.outputs] for draw in draws]
        own = separate, faults
        separate, faults = ranks.link.decide(f"step {plan}", lambda: own)
        for index, error in faults:
            on_fault(outputs[index], error)
        if ranks.link.is_first:
            for draw in draws:
                ranks.collectives.broadcast(draw.sampled.token_ids)
            return draws
        if separate is None:
            return [self._received(outputs)]
        return [self._received([outputs[n] for n in rows]) for rows in separate]

    def _received(self, outputs: list[OutputProgress]) -> Draw:
        """The tokens of rank 0 for ``outputs``."""
        assert self.ranks is not None
        tokens = torch.empty(len(outputs), dtype=torch.int64, device=self.device)
        tokens = self.ranks.collectives.broadcast(tokens)
        return Draw(outputs, SampledTokens(tokens, {}), Arrival.of(tokens))

    def _batch_of(self, outputs: list[OutputProgress]) -> SamplingBatch:
        if self._batch is None or self._outputs != outputs:
            states = [output.sampling for output in outputs]
            self._outputs, self._batch = outputs, SamplingBatch(states, device=self.device)
        return self._batch
