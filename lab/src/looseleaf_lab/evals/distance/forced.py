"""Distributions along a given output, each from a decode row: `select` applies to these rows."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.config import Select
from looseleaf.engine.engine import Engine
from looseleaf.engine.progress import RequestProgress
from looseleaf.engine.sampling.state import SamplingState
from looseleaf.prompt.request import PromptParts, Request, TextPart
from looseleaf.sampling_params import SamplingParams
from looseleaf_lab.evals.distance.logits import Prepare

# a penalty makes the engine pass each row of logits to the state
_PENALTY = 1.0


class ForcedSampling(SamplingState):
    """The state of an output whose tokens are given. ``rows`` are its log-softmax rows, fp32."""

    def __init__(self, params: SamplingParams, token_ids: Sequence[int], vocab_size: int) -> None:
        super().__init__(params, (), vocab_size=vocab_size)
        self._forced = tuple(token_ids)
        self.rows: list[Float[Tensor, " vocab_size"]] = []

    def penalized(self, logits: Float[Tensor, "vocab"]) -> Float[Tensor, "vocab"]:
        """A row that permits only the given token; keeps the distribution of ``logits``."""
        self.rows.append(logits.log_softmax(-1).cpu())
        forced = torch.full_like(logits, -torch.inf)
        forced[self._forced[self.num_output_tokens]] = 0.0
        return forced


def decoded_distributions(
    engine: Engine,
    name: str,
    parts: PromptParts,
    answer: Sequence[int],
    select: Select | None,
    prepare: Prepare = lambda sequence: None,
) -> tuple[Float[Tensor, "answer vocab_size"], RequestProgress]:
    """The log-softmax rows of ``answer``'s tokens after a prompt, and the request.

    The prompt's last token is decoded, too, so that every row is one of decode. ``prepare`` is
    called with the waiting sequence. Raises the error of the request."""
    *before, last = parts
    shorter = TextPart(last.tokens[:-1], getattr(last, "num_shared", 0))
    forced = [last.tokens[-1], *answer]
    params = SamplingParams(
        temperature=0.0, max_tokens=len(forced), presence_penalty=_PENALTY, ignore_eos=True
    )
    request = Request(name, (*before, shorter), params, select=select)
    progress = engine.add(request)
    state = ForcedSampling(params, forced, engine.prompts.vocab_size)
    progress.outputs[0].sampling = state
    prepare(progress.outputs[0].sequence)
    while not progress.finished:
        engine.step()
    if progress.error is not None:
        raise progress.error
    return torch.stack(state.rows[1:]), progress
