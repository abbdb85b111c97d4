"""The sampling state of an output: parameters, token counts and grammar position; a step's batch.

A random number is a function of a seed, an output and a step. So a draw does not depend on the
batch, and preempted outputs resume with the same draws. A batch groups its rows by option, so that
each option is applied once."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from looseleaf.engine.sampling.grammar_state import GrammarState
from looseleaf.engine.sampling.rank_grammar import RankGrammar
from looseleaf.engine.sampling.triggered import TriggeredState
from looseleaf.errors import InvalidRequest
from looseleaf.sampling_params import SamplingParams


@dataclass
class TokenCounts:
    """The set of prompt tokens, and the count of each output token."""

    in_prompt: Bool[Tensor, "vocab"]
    in_output: Float[Tensor, "vocab"]

    @classmethod
    def of_tokens(
        cls, prompt: Sequence[int], output: Sequence[int], vocab: int, device: torch.device
    ) -> "TokenCounts":
        """Counts over a vocabulary of ``vocab`` tokens."""
        in_prompt = torch.zeros(vocab, dtype=torch.bool)
        in_prompt[torch.tensor(prompt, dtype=torch.long)] = True
        in_output = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=vocab)
        return cls(in_prompt.to(device), in_output.float().to(device))

    def add(self, token_id: Tensor) -> None:
        """Count an output token, a scalar on the device of the counts."""
        self.in_output[token_id] += 1.0


def penalize(
    logits: Float[Tensor, "vocab"],
    counts: TokenCounts,
    params: SamplingParams,
) -> Float[Tensor, "vocab"]:
    """A row with penalties: repetition for all tokens, frequency and presence for output tokens."""
    in_output = counts.in_output > 0
    penalty = params.repetition_penalty
    repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
    logits = torch.where(counts.in_prompt | in_output, repeated, logits)
    return (
        logits
        - params.frequency_penalty * counts.in_output
        - params.presence_penalty * in_output.float()
    )


def uniform(seed: int, child: int, step: int) -> float:
    """A number in [0, 1) for output ``child`` of a request at its ``step``-th token."""
    digest = blake2b(f"{seed}/{child}/{step}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class SamplingState:
    """The sampling state of an output. ``record`` updates it, except for plain greedy outputs."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
        child: int = 0,
        seed: int = 0,
        output_token_ids: Sequence[int] = (),
        grammar: GrammarState | TriggeredState | RankGrammar | None = None,
    ) -> None:
        """``child`` is the index of the output among the ``n`` of its request.

        Only penalties read ``prompt_token_ids``. ``seed`` is the engine's, for requests without a
        seed. ``output_token_ids`` are the first tokens of the output. Raises InvalidRequest if an
        option names a token that the model lacks.
        """
        self.params = params
        self.bias = dict(params.logit_bias or ())
        stop_token_ids = tuple(params.stop_token_ids or ())
        for option, ids in (("logit_bias", self.bias), ("stop_token_ids", stop_token_ids)):
            if beyond := [token for token in ids if not 0 <= token < vocab_size]:
                raise InvalidRequest(
                    f"{option} names token {beyond[0]}, but the model's tokens are 0 to "
                    f"{vocab_size - 1}: use ids of this model's tokenizer"
                )
        ends = {*eos_token_ids, *stop_token_ids}
        self._ends = tuple(sorted(token for token in ends if token < vocab_size))
        self.grammar = grammar
        self._seed = seed if params.seed is None else params.seed
        self._child = child
        self._prompt = prompt_token_ids
        self._output = output_token_ids
        self._counts: TokenCounts | None = None
        self.num_output_tokens = len(output_token_ids)

    @property
    def plain_greedy(self) -> bool:
        """Whether every token is the argmax of the model's logits, without log-probabilities."""
        params = self.params
        adjusted = params.has_penalties or self.bias or params.min_tokens or self.grammar
        return params.greedy and not adjusted and params.logprobs is None

    def forbidden(self) -> tuple[int, ...]:
        """End tokens while the output is shorter than ``min_tokens``, else none."""
        return self._ends if self.num_output_tokens < self.params.min_tokens else ()

    def allowed(self) -> Bool[Tensor, "vocab"] | None:
        """The tokens that the grammar allows next, with all end tokens if the text may end.

        None for all tokens."""
        assert self.grammar is not None, "only a constrained output has allowed tokens"
        allowed = self.grammar.allowed()
        if allowed is not None and self.grammar.accepting:
            allowed[list(self._ends)] = True
        return allowed

    def draw(self) -> float:
        """This step's random number, in [0, 1)."""
        return uniform(self._seed, self._child, self.num_output_tokens)

    def penalized(self, logits: Float[Tensor, "vocab"]) -> Float[Tensor, "vocab"]:
        """``logits`` after the penalties for the tokens so far."""
        if self._counts is None:
            self._counts = TokenCounts.of_tokens(
                self._prompt, self._output, logits.shape[-1], logits.device
            )
        return penalize(logits, self._counts, self.params)

    def record(self, token_id: Tensor) -> None:
        """Record the next output token, a scalar tensor, without a device synchronization."""
        self.num_output_tokens += 1
        if self._counts is not None:
            self._counts.add(token_id)


# above any vocabulary, within int64
_MAX_TOP_K = 1 << 31


class Option(NamedTuple):
    """An option of the rows that use it: ``rows`` int64 ``[used]``, ``values`` ``[used, 1]``."""

    rows: Tensor
    values: Tensor


class Bias(NamedTuple):
    """All logit biases of a batch, an entry per row and token: three tensors ``[entries]``."""

    rows: Tensor
    token_ids: Tensor
    values: Tensor


class SamplingBatch:
    """The states of a step's rows, in the order of its logits.

    Reusable while rows hold the same outputs. ``temperature`` and the filters index into
    ``random_rows``, all other options into the batch. An option without rows is None.
    """

    def __init__(
        self, states: Sequence[SamplingState], *, device: torch.device | str = "cpu"
    ) -> None:
        self.states = tuple(states)
        self.device = torch.device(device)
        all_params = [state.params for state in self.states]
        self.plain_greedy = all(state.plain_greedy for state in self.states)
        self.tracked = [i for i, state in enumerate(self.states) if not state.plain_greedy]
        self.penalized = [i for i, params in enumerate(all_params) if params.has_penalties]
        self.constrained = [i for i, s in enumerate(self.states) if s.grammar is not None]
        self.delayed = [i for i, params in enumerate(all_params) if params.min_tokens > 0]
        self.num_logprobs = {
            i: p.logprobs for i, p in enumerate(all_params) if p.logprobs is not None
        }
        self.bias = self._bias()

        self.random = [i for i, params in enumerate(all_params) if not params.greedy]
        self.random_rows = torch.tensor(self.random, dtype=torch.long, device=self.device)
        self.temperature = self._option(lambda p: p.temperature)
        self.min_p = self._option(lambda p: p.min_p or None)
        self.top_k = self._option(lambda p: min(p.top_k, _MAX_TOP_K) or None)
        self.top_p = self._option(lambda p: p.top_p if p.top_p < 1.0 else None)

    def forbidden(self) -> tuple[list[int], list[int]]:
        """Rows and tokens that this step must not draw, as two lists of equal length."""
        pairs = [(i, token) for i in self.delayed for token in self.states[i].forbidden()]
        return [i for i, _ in pairs], [token for _, token in pairs]

    def draws(self) -> Tensor:
        """This step's random numbers for ``random_rows``, fp64 ``[random rows, 1]``."""
        numbers = [[self.states[i].draw()] for i in self.random]
        return torch.tensor(numbers, dtype=torch.float64, device=self.device)

    def record(self, token_ids: Tensor) -> None:
        """Record the drawn tokens ``[rows]`` in the states."""
        for i in self.tracked:
            self.states[i].record(token_ids[i])

    def _option(self, value: Callable[[SamplingParams], float | None]) -> Option | None:
        """``value`` of each random row, by its index in ``random``; None means not used."""
        values = [value(self.states[i].params) for i in self.random]
        used = [(row, value) for row, value in enumerate(values) if value is not None]
        if not used:
            return None
        return Option(
            torch.tensor([row for row, _ in used], device=self.device),
            torch.tensor([[value] for _, value in used], device=self.device),
        )

    def _bias(self) -> Bias | None:
        entries = [(i, *item) for i, state in enumerate(self.states) for item in state.bias.items()]
        if not entries:
            return None
        rows, token_ids, values = zip(*entries, strict=True)
        return Bias(
            torch.tensor(rows, device=self.device),
            torch.tensor(token_ids, device=self.device),
            torch.tensor(values, dtype=torch.float32, device=self.device),
        )
