"""One prompt answered under observation, to compare a policy with full prefill.

Greedy, by itself, through the engine's own steps; besides the answer it looks at what the engine
holds when the prompt is complete."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.config import Fuse
from looseleaf.engine.engine import Engine
from looseleaf.engine.reports.outputs import ReuseReport
from looseleaf.engine.sampling import TokenLogprob
from looseleaf.engine.sequence import Phase
from looseleaf.engine.sequence import Sequence as OneOutput
from looseleaf.prompt.request import PromptParts, Request
from looseleaf.sampling_params import SamplingParams

_LIKELIEST = 64
_numbers = count()


@dataclass(frozen=True)
class Probed:
    """An answer, and what was behind it.

    ``logprobs`` has the likeliest tokens of every position. ``values`` are those of the prompt's
    last text, ``[layers, tokens, kv_heads, head_dim]`` in fp32. ``positions`` were computed again;
    ``scores`` are those of their evidence at ``candidates``, both empty without evidence."""

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
    """The answer to one prompt of an idle engine; ``num_text`` tokens end it.

    Raises what `Engine.add` raises, and the error that ended the request."""
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
    one, fusion = output.outputs[0], sequence.fusion
    scores = fusion.scores if fusion and fusion.scores is not None else torch.empty(0)
    return Probed(
        one.token_ids,
        one.logprobs or (),
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
    full: Sequence[Sequence[TokenLogprob]], mine: Sequence[Sequence[TokenLogprob]]
) -> float:
    """Kullback-Leibler divergence of one next-token distribution from another, in nats, from the
    likeliest tokens of both; the rest of each counts as one token. Mean over positions."""
    found = [_divergence(one, other) for one, other in zip(full, mine, strict=False)]
    return sum(found) / len(found) if found else 0.0


def _divergence(full: Sequence[TokenLogprob], mine: Sequence[TokenLogprob]) -> float:
    true = {one.token_id: one.logprob for one in full}
    given = {one.token_id: one.logprob for one in mine}
    # what is not among the likeliest is at most as likely as the last of them
    least = min(given.values())
    p = torch.tensor(list(true.values()), dtype=torch.float64).exp()
    q = torch.tensor([given.get(token, least) for token in true], dtype=torch.float64).exp()
    p, q = (torch.cat((x, (1 - x.sum()).clamp_min(1e-12)[None])).clamp_min(1e-12) for x in (p, q))
    return max(0.0, float((p * (p / q).log()).sum()))
