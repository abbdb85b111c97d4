"""The sampling state of an output: parameters, token counts and grammar position.

A random number is a function of a seed, an output and a step. So a draw does not depend on the
batch, and preempted outputs resume with the same draws."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from looseleaf.engine.sampling.grammar import GrammarState
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
        grammar: GrammarState | None = None,
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

    def allowed(self) -> Bool[Tensor, "vocab"]:
        """The tokens that the grammar allows next, with all end tokens if the text may end."""
        assert self.grammar is not None, "only a constrained output has allowed tokens"
        allowed = self.grammar.allowed()
        if self.grammar.accepting:
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
