"""The question's attention (as ProphetKV and A3): stored tokens that the request's text reads most.

One pass of the text rows over the stored documents yields the scores. Only the last layers count,
because most layers attend to punctuation and first tokens. The text is computed again with the
chosen tokens."""

from dataclasses import dataclass
from typing import ClassVar

from looseleaf.blend.budget import Budget
from looseleaf.blend.selectors.base import Evidence, Selector
from looseleaf.errors import InvalidOption


@dataclass(frozen=True)
class Question(Selector):
    """Chooses the tokens that text rows attend to most in the last ``watched_share`` of the layers.

    Scores are the maximum of the received attention over the layers of ``watches``."""

    evidence: ClassVar[Evidence] = "question"
    budget: Budget
    watched_share: float = 0.25

    def __post_init__(self) -> None:
        if not 0 < self.watched_share <= 1:
            raise InvalidOption(f"a share of the layers is in 0 to 1, not {self.watched_share}")
