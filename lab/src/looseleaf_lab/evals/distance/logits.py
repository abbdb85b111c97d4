"""Full log-softmax rows of given answers, from the engine's own scoring of prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.engine.engine import Engine
from looseleaf.engine.progress import RequestProgress
from looseleaf.engine.prompt_logprobs import Project, PromptLogprobs
from looseleaf.engine.sequence import Sequence as OneOutput
from looseleaf.prompt.request import Request

Prepare = Callable[[OneOutput], None]


@dataclass(eq=False)
class KeptRows(PromptLogprobs):
    """Scores of a prompt that also keep the distributions of the scored tokens on the host."""

    kept: dict[int, Float[Tensor, " vocab_size"]] = field(default_factory=dict)

    def take(
        self,
        hidden: Float[Tensor, "rows hidden_size"],
        indices: npt.NDArray[np.int64],
        project: Project,
    ) -> None:
        super().take(hidden, indices, project)
        rows = project(hidden).float().log_softmax(-1).cpu()
        self.kept |= zip((indices + 1).tolist(), rows, strict=True)

    def distributions(self) -> Float[Tensor, "tokens vocab_size"]:
        """The distributions in the order of the prompt."""
        return torch.stack([self.kept[index] for index in sorted(self.kept)])


def run(
    engine: Engine, requests: Sequence[Request], prepare: Prepare = lambda sequence: None
) -> list[RequestProgress]:
    """Run requests to their end; ``prepare`` is called with each waiting sequence.

    Raises the first error of a request."""
    progresses = [engine.add(request) for request in requests]
    for progress in progresses:
        prepare(progress.outputs[0].sequence)
    _finish(engine, progresses)
    return progresses


def distributions(
    engine: Engine, requests: Sequence[Request], prepare: Prepare = lambda sequence: None
) -> list[Float[Tensor, "tokens vocab_size"]]:
    """The log-softmax rows, fp32, of each request's scored tokens; ``prepare`` as in `run`."""
    keepers = list[KeptRows]()

    def keep(sequence: OneOutput) -> None:
        prepare(sequence)
        scorer = sequence.prompt_logprobs
        assert scorer is not None, "the request asks for the scores of its prompt"
        keeper = KeptRows(scorer.tokens, scorer.num_top, scorer.start, scorer.parts)
        sequence.prompt_logprobs = keeper
        keepers.append(keeper)

    run(engine, requests, keep)
    return [keeper.distributions() for keeper in keepers]


def _finish(engine: Engine, progresses: Sequence[RequestProgress]) -> None:
    while not all(progress.finished for progress in progresses):
        engine.step()
    for progress in progresses:
        if progress.error is not None:
            raise progress.error


def divergence(
    full: Float[Tensor, "tokens vocab_size"], other: Float[Tensor, "tokens vocab_size"]
) -> float:
    """The mean Kullback-Leibler divergence of ``other`` from ``full``, in nats per token."""
    p, q = full.double(), other.double()
    return float((p.exp() * (p - q)).sum(-1).mean().clamp_min(0.0))


def likelihood(rows: Float[Tensor, "tokens vocab_size"], token_ids: Sequence[int]) -> float:
    """The mean log-probability of ``token_ids`` under ``rows``, in nats per token."""
    return float(rows.gather(1, torch.tensor([*token_ids])[:, None]).double().mean())
