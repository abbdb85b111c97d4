"""The window of one output: which of its rows a step computes, and what is final for them.

Keys of rows in the window are written anew at every step, so a page is *sealed* only once its last
token has left the window. Until then every row reads it anew at every step, and what is kept of a
row knows nothing of it: so no stale key stays in a kept output. In the step that seals a page all
rows read it once more, and keep it."""

from dataclasses import dataclass


@dataclass
class Window:
    """Rows of one output, the newest at ``position``, with ``num_past`` earlier ones behind it.

    The window begins with the first token that is decoded (a prompt is never revised) and grows by
    a row a step, up to what the step allows. A row that has left it is final and does not come
    back. A step that was computed in vain is made again, with the same window. ``sealed`` counts
    the tail's sealed pages, ``newly_sealed`` those that past rows must still take over.
    """

    position: int = -1
    num_past: int = -1
    sealed: int = 0
    newly_sealed: int = 0

    def advance(self, position: int, width: int, start: int, page_size: int) -> None:
        """A step whose newest row is at ``position``, with at most ``width`` rows, of a tail that
        begins at position ``start``.
        """
        assert width >= 1, "a step has at least its newest row"
        if position == self.position:
            return
        follows = position == self.position + 1
        kept = self.num_past + 1 if follows else 0
        self.position, self.num_past = position, min(width - 1, kept)
        sealed = max(0, self.first - start) // page_size
        # rows that come first have nothing to take over
        self.newly_sealed = sealed - self.sealed if self.num_past else 0
        self.sealed = sealed

    def restart(self) -> None:
        """Nothing is kept of the rows so far: the next step has its newest row only."""
        self.position = self.num_past = -1

    @property
    def num_rows(self) -> int:
        return self.num_past + 1

    @property
    def first(self) -> int:
        """The position of the oldest row: keys before it are final."""
        return self.position - self.num_past
