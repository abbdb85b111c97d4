"""A row's budget for a KV head, in pages: `Select` states it in tokens and shares."""

from dataclasses import dataclass

from looseleaf.config import Select, share_of


@dataclass(frozen=True)
class Budget:
    """At most ``pages``, or the share ``ratio`` of all pages; with ``mass`` the fewest pages that
    are expected to hold that share of the attention. The first ``sink`` and the last ``recent``
    pages are mandatory, as far as the budget allows."""

    pages: int | None = None
    ratio: float | None = None
    mass: float | None = None
    sink: int = 0
    recent: int = 0

    @classmethod
    def of(cls, select: Select, page_size: int) -> "Budget":
        """The budget of a policy over pages of ``page_size`` tokens, each counted whole."""

        def pages(tokens: int) -> int:
            return -(-tokens // page_size)

        most = None if select.tokens is None else pages(select.tokens)
        # all attention means all pages, however small their shares
        mass = None if select.mass == 1.0 else select.mass
        return cls(most, select.ratio, mass, pages(select.sink), pages(select.recent))

    def limit(self, num_candidates: int, num_other: int) -> int:
        """The most candidates that are chosen beside ``num_other`` pages; at least one."""
        most = num_candidates + num_other
        if self.pages is not None:
            most = self.pages
        elif self.ratio is not None:
            most = share_of(self.ratio, most)
        return min(num_candidates, max(1, most - num_other))
