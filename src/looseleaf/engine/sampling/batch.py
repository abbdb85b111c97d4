"""The sampling options of a step's rows, grouped by option so that each is applied once."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from looseleaf.engine.sampling.state import SamplingState
from looseleaf.sampling_params import SamplingParams

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
