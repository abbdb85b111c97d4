"""The prefill rows of a step by a time goal, so that long prompts do not delay running outputs.

It has an effect with ``step_ms`` only. `Scheduler` decides on the rows of every step.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from looseleaf.engine.sequence import Sequence
from looseleaf.engine.tiering.compute_time import ComputeTime
from looseleaf.parallel import Ranks

LEAST_ROWS = 64
"""Prefill rows of a step that has any, also if its decode rows alone take longer than the goal."""


@dataclass(frozen=True)
class StepBudget:
    """The most prefill rows of a step that should take at most ``seconds``.

    ``compute_time`` predicts a step from its rows and the keys that they read. With ``ranks`` the
    times are rank 0's."""

    seconds: float
    compute_time: ComputeTime
    ranks: Ranks | None = None

    def rows(self, decode: Rows[Sequence], prompt_tokens: int) -> int:
        """The most new rows beside the rows of ``decode``, at least `LEAST_ROWS`.

        Each new row counts as if it read all ``prompt_tokens`` of its prompt."""
        if self.ranks is None:
            return self._rows(decode, prompt_tokens)
        return self.ranks.link.decide("step budget", lambda: self._rows(decode, prompt_tokens))

    def _rows(self, decode: Rows[Sequence], prompt_tokens: int) -> int:
        num, keys = len(decode), sum(sequence.num_tokens for sequence in decode)
        alone = self.compute_time.predict(num, keys)
        with_row = self.compute_time.predict(num + 1, keys + prompt_tokens)
        if alone is None or with_row is None or with_row <= alone:
            return LEAST_ROWS
        return max(LEAST_ROWS, int((self.seconds - alone) / (with_row - alone)))
