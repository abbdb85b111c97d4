"""Sampling of a step: one batch of all outputs, or one output at a time after a fault.

A fault then ends only the request that causes it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.engine.progress import OutputProgress
from looseleaf.engine.runner.batch import Arrival
from looseleaf.engine.sampling import SampledTokens, Sampler, SamplingBatch
from looseleaf.engine.scheduler import StepWork

OnFault = Callable[[OutputProgress, Exception], None]


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
    """Samples steps. Consecutive steps of the same outputs share one sampling batch."""

    device: torch.device
    _sampler: Sampler = field(default_factory=Sampler)
    _outputs: list[OutputProgress] = field(default_factory=list)
    _batch: SamplingBatch | None = None

    def draw(
        self,
        outputs: list[OutputProgress],
        logits: Float[Tensor, "outputs vocab_size"],
        on_fault: OnFault,
    ) -> list[Draw]:
        """The next token of every output. ``on_fault`` is called with each output that fails, and
        ends it."""
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

    def _batch_of(self, outputs: list[OutputProgress]) -> SamplingBatch:
        if self._batch is None or self._outputs != outputs:
            states = [output.sampling for output in outputs]
            self._outputs, self._batch = outputs, SamplingBatch(states, device=self.device)
        return self._batch
