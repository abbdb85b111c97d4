"""The window of one output: the rows that a step computes, and the pages that are final for them.

Rows in the window rewrite their keys at every step, so a page is *sealed* only when its last token
has left the window. Until then every row rereads it at every step, and no cached state covers it:
so cached states contain no stale key. In the step that seals a page all rows read it once more, and
cache the result."""

from dataclasses import dataclass


@dataclass
class Window:
    """Rows of one output: the newest at ``position``, and ``num_past`` rows before it.

    The window begins at the first decoded token, since prompts are never revised. It grows by a row
    a step, up to the step's limit. A row that leaves is final. A repeated step has the same window.
    ``sealed`` counts the tail's sealed pages, ``newly_sealed`` the pages that past rows must still
    take over.
    """

    position: int = -1
    num_past: int = -1
    sealed: int = 0
    newly_sealed: int = 0

    def advance(self, position: int, width: int, start: int, page_size: int) -> None:
        """Begin a step whose newest row is at ``position``, with at most ``width`` rows; the tail
        begins at position ``start``.
        """
        assert width >= 1, "a step has at least its newest row"
        if position == self.position:
            return
        follows = position == self.position + 1
        kept = self.num_past + 1 if follows else 0
        self.position, self.num_past = position, min(width - 1, kept)
        sealed = max(0, self.first - start) // page_size
        # without past rows there is nothing to take over
        self.newly_sealed = sealed - self.sealed if self.num_past else 0
        self.sealed = sealed

    def restart(self) -> None:
        """Drop all past rows: the next step has its newest row only."""
        self.position = self.num_past = -1

    @property
    def num_rows(self) -> int:
        return self.num_past + 1

    @property
    def first(self) -> int:
        """The position of the oldest row: keys before it are final."""
        return self.position - self.num_past
