"""The probe: one greedy answer with its internals, to compare a policy with full prefill.

The probe runs a prompt alone through the engine's steps. It also reads stored values from the
engine at the end of the prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.config import Fuse
from looseleaf.engine.engine import Engine
from looseleaf.engine.reports.outputs import ReuseReport
from looseleaf.engine.sampling.sampler import TokenLogprob
from looseleaf.engine.sequence import Phase
from looseleaf.engine.sequence import Sequence as OneOutput
from looseleaf.prompt.request import PromptParts, Request
from looseleaf.sampling_params import SamplingParams

_LIKELIEST = 64
_numbers = count()


@dataclass(frozen=True)
class Probed:
    """An answer with its log-probabilities, values and chosen positions.

    ``logprobs`` has the likeliest tokens of every position. ``values`` are the values of the
    prompt's last text, ``[layers, tokens, kv_heads, head_dim]`` in fp32. ``positions`` were
    computed again. ``scores`` are the token scores at ``candidates``, empty without token
    scoring."""

    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]
    values: Float[Tensor, "layers tokens kv_heads head_dim"]
    reuse: ReuseReport
    positions: tuple[int, ...] = ()
    candidates: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()


def probe(
    engine: Engine, parts: PromptParts, fuse: Fuse | None, num_text: int, max_tokens: int
) -> Probed:
    """The answer of an idle engine to one prompt, whose last ``num_text`` tokens are text.

    Raises the errors of `Engine.add`, and the error that ended the request."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=_LIKELIEST)
    request = Request(f"(probe {next(_numbers)})", parts, params, fuse=fuse)
    progress = engine.add(request)
    try:
        sequence = progress.outputs[0].sequence
        values = torch.empty(0, 0, 0, 0)
        while not progress.finished:
            engine.step()
            if not len(values) and sequence.phase is Phase.DECODE:
                values = _text_values(engine, sequence, num_text)
    finally:
        engine.abort(request.request_id)
    if progress.error is not None:
        raise progress.error
    output = progress.output()
    answer, fusion = output.outputs[0], sequence.fusion
    scores = fusion.scores if fusion and fusion.scores is not None else torch.empty(0)
    return Probed(
        answer.token_ids,
        answer.logprobs or (),
        values,
        output.reuse,
        tuple(fusion.chosen_positions) if fusion else (),
        tuple(fusion.candidates.positions.tolist()) if fusion else (),
        tuple(scores.tolist()),
    )


def _text_values(engine: Engine, sequence: OneOutput, num_text: int) -> Tensor:
    """Values of the last ``num_text`` tokens of the prompt, in every layer."""
    pool, tail = engine.store.pool, sequence.tail
    stop = tail.num_tokens - len(sequence.output_token_ids)
    places = torch.arange(stop - num_text, stop)
    pages = torch.tensor(tail.pages)[places // pool.page_size].to(pool.kv.device)
    slots = (places % pool.page_size).to(pool.kv.device)
    layers = range(engine.runner.model.config.num_layers)
    return torch.stack([pool.layer(n)[1][pages, :, slots].float().cpu() for n in layers])


def divergence(
    full: Sequence[Sequence[TokenLogprob]], policy: Sequence[Sequence[TokenLogprob]]
) -> float:
    """The mean Kullback-Leibler divergence of next-token distributions, in nats.

    It compares the likeliest tokens of ``full`` with ``policy``, position by position. All other
    tokens count as one token."""
    divergences = [
        _divergence(true, estimate) for true, estimate in zip(full, policy, strict=False)
    ]
    return sum(divergences) / len(divergences) if divergences else 0.0


def _divergence(full: Sequence[TokenLogprob], policy: Sequence[TokenLogprob]) -> float:
    true = {entry.token_id: entry.logprob for entry in full}
    estimate = {entry.token_id: entry.logprob for entry in policy}
    # an unlisted token is at most as likely as the last listed token
    least = min(estimate.values())
    p = torch.tensor(list(true.values()), dtype=torch.float64).exp()
    q = torch.tensor([estimate.get(token, least) for token in true], dtype=torch.float64).exp()
    p, q = (torch.cat((x, (1 - x.sum()).clamp_min(1e-12)[None])).clamp_min(1e-12) for x in (p, q))
    return max(0.0, float((p * (p / q).log()).sum()))
