"""The question's attention (as ProphetKV and A3): which stored tokens the request's own text reads.

One pass of the text rows alone over the stored documents shows it; the text is computed once more,
with the chosen tokens. Not every layer counts: most read for the sake of language (punctuation,
first tokens), and their mean or maximum over all layers buries the few layers that fetch the
answer. So only the last layers are watched."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.blend.budget import Budget, choose
from looseleaf.blend.candidates import Candidates, Evidence
from looseleaf.errors import InvalidOption


@dataclass(frozen=True)
class Question:
    """Chooses the tokens that text rows attend to most in the last ``watched_share`` of the layers.

    Scores are the maximum of the attention received over the layers that ``watches`` names."""

    budget: Budget
    watched_share: float = 0.25

    def __post_init__(self) -> None:
        if not 0 < self.watched_share <= 1:
            raise InvalidOption(f"a share of the layers is in 0 to 1, not {self.watched_share}")

    @property
    def evidence(self) -> Evidence:
        return "question"

    def watches(self, layer: int, num_layers: int) -> bool:
        """Whether attention at ``layer`` counts. The last layer always does."""
        return layer >= min(num_layers - 1, round(num_layers * (1 - self.watched_share)))

    def select(
        self, candidates: Candidates, scores: Float[Tensor, " tokens"]
    ) -> Int[Tensor, " kept"]:
        return choose(scores, candidates, self.budget)
