"""Log-probabilities of prompt tokens, collected while the rows of their predecessors are computed.

A token is scored if its predecessor is a text token of the prompt. That row sees all placements
before it, whether they are cached or not. Rows of documents are shared between prompts and see
other text, so a document's tokens have no score except its first one after text. The text after a
document is scored from its second token on. Prefix pages hide no row: a scored sequence reuses only
the pages before its first scored row. Logits exist for a few rows at a time."""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.engine.sampling.sampler import TokenLogprob, entries_of, top_logprobs
from looseleaf.graphs.rows import to_device
from looseleaf.prompt.placements import DocumentUse, HostedUse, TextRun

IntArray = npt.NDArray[np.int64]
Project = Callable[[Float[Tensor, "rows hidden_size"]], Float[Tensor, "rows vocab_size"]]
Entry = tuple[TokenLogprob, ...]
ROWS_AT_ONCE = 128
"""Rows whose logits are in memory at the same time."""


@dataclass(frozen=True)
class _Scored:
    """Scores on the device: ``indices`` are the scored tokens' indices in the prompt."""

    indices: list[int]
    tokens: list[int]
    scores: tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(eq=False)
class PromptLogprobs:
    """The scores of one sequence's prompt, from the token with index ``start`` on.

    ``num_top`` is the number of most likely tokens per position. ``complete`` is whether the whole
    prompt has been computed."""

    tokens: Rows[int]
    num_top: int
    start: int
    parts: Rows[TextRun | DocumentUse | HostedUse]
    complete: bool = False
    _pending: list[_Scored] = field(default_factory=list)
    _entries: tuple[Entry | None, ...] = ()

    def __post_init__(self) -> None:
        offsets = np.cumsum([0, *(part.num_tokens for part in self.parts)])
        pairs = [
            (part, int(offset))
            for part, offset in zip(self.parts, offsets[:-1], strict=True)
            if isinstance(part, TextRun) and part.num_tokens
        ]
        self._offsets = {id(run): offset for run, offset in pairs}
        runs = [(run.start, run.num_tokens, offset) for run, offset in pairs]
        self._runs = np.array(runs, dtype=np.int64).reshape(-1, 3)

    @property
    def first_row(self) -> int:
        """The index of the first prompt token whose row is scored."""
        return max(self.start, 1) - 1

    def num_reusable(self, run: TextRun) -> int:
        """Tokens of ``run`` whose rows are not scored, so that the prefix cache may have them."""
        if self.complete:
            return run.num_tokens
        return max(0, self.first_row - self._offsets.get(id(run), 0))

    def rows(self, positions: npt.ArrayLike) -> tuple[IntArray, IntArray]:
        """The scored rows among rows of text and patch at ``positions``, and the indices of their
        tokens in the prompt."""
        places = np.asarray(positions, dtype=np.int64)
        if not len(self._runs):
            return places[:0], places[:0]
        starts, lengths, offsets = self._runs.T
        which = np.searchsorted(starts, places, "right") - 1
        distances = places - starts[which]
        indices = distances + offsets[which]
        is_text = (which >= 0) & (distances < lengths[which])
        scored = is_text & (indices >= self.first_row) & (indices < len(self.tokens) - 1)
        rows = np.flatnonzero(scored)
        return rows, indices[rows]

    def take(
        self, hidden: Float[Tensor, "rows hidden_size"], indices: IntArray, project: Project
    ) -> None:
        """Score the successors of the tokens at ``indices``, whose final states are ``hidden``."""
        for start in range(0, len(indices), ROWS_AT_ONCE):
            following = (indices[start : start + ROWS_AT_ONCE] + 1).tolist()
            tokens = [self.tokens[index] for index in following]
            logits = project(hidden[start : start + ROWS_AT_ONCE])
            ids = to_device(torch.tensor(tokens, dtype=torch.int64), logits.device)
            scores = top_logprobs(logits, ids, self.num_top)
            self._pending.append(_Scored(following, tokens, scores))

    def finish(self) -> None:
        """Copy the scores to the host, after the last row of the prompt is computed."""
        if self.complete:
            return
        by_index: dict[int, Entry] = {}
        for scored in self._pending:
            counts = [self.num_top] * len(scored.tokens)
            entries = entries_of(scored.tokens, scored.scores, counts)
            by_index |= zip(scored.indices, entries, strict=True)
        self._pending.clear()
        self._entries = tuple(by_index.get(index) for index in range(len(self.tokens)))
        self.complete = True

    def reset(self) -> None:
        """Drop the scores of a prompt that starts over before it was complete."""
        self._pending.clear()

    def entries(self) -> tuple[Entry | None, ...] | None:
        """One entry per prompt token: the token itself, then the likeliest; None without a score.

        Returns None before the prompt is complete."""
        return self._entries if self.complete else None


@dataclass(frozen=True)
class ScoredRows:
    """Rows of a step that a sequence scores, and the indices of their tokens in its prompt."""

    scorer: PromptLogprobs
    rows: IntArray
    indices: IntArray

    def take(self, hidden: Float[Tensor, "rows hidden_size"], project: Project) -> None:
        """Score the rows; ``hidden`` are the final states of all rows of the step."""
        chosen = to_device(torch.from_numpy(self.rows), hidden.device)
        self.scorer.take(hidden.index_select(0, chosen), self.indices, project)
