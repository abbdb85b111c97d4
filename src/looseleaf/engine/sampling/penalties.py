"""Repetition, frequency and presence penalties on logits, as in vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

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
