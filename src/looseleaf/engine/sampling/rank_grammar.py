"""The position of an output in its grammar, for all ranks of an engine."""

from jaxtyping import Bool
from torch import Tensor

from looseleaf.engine.sampling.grammar_state import GrammarState
from looseleaf.engine.sampling.triggered import TriggeredState
from looseleaf.parallel import Link


class RankGrammar:
    """The grammar of rank 0, which alone has ``own`` and needs masks.

    The other ranks receive the effect of each token."""

    def __init__(self, link: Link, own: GrammarState | TriggeredState | None) -> None:
        self._link, self._own = link, own
        self.complete = False

    @property
    def accepting(self) -> bool:
        """Whether the text may end."""
        return self._lead.accepting

    def allowed(self) -> Bool[Tensor, "vocab"] | None:
        """The mask of the tokens that may follow; None for all."""
        return self._lead.allowed()

    def push(self, token_id: int) -> None:
        """Append a token, on all ranks. Raises InvalidRequest if the grammar does not allow it."""

        def push() -> bool:
            self._lead.push(token_id)
            return self._lead.complete

        self.complete = self._link.decide("grammar", push)

    @property
    def _lead(self) -> GrammarState | TriggeredState:
        assert self._own is not None, "only rank 0 samples"
        return self._own
