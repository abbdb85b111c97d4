"""The experts of a decoder's layers and the law of their router."""

from dataclasses import dataclass
from typing import Literal

from looseleaf.config.option import require, require_each, require_positive


@dataclass(frozen=True)
class ExpertConfig:
    """Layers whose MLP is a mixture of experts, of which a router chooses ``top_k`` for each row.

    A score is the ``scoring`` of a row's logits. The weights of a row's experts are their scores,
    divided by their sum if ``normalized``, times ``scaling``. With ``selection_bias`` a stored bias
    is added to scores for the choice only. ``router_bias`` is added to logits. With
    ``expert_bias`` both products of an expert have a bias.

    Experts form ``num_groups`` equal groups, of which the ``top_groups`` best have candidates. A
    group's score is the sum of its ``group_scores`` largest scores (DeepSeek V3: two, V2: one).

    ``num_shared`` experts, stored after the ``num_experts`` others, add to every row with weight 1,
    or with the sigmoid of a further logit if ``shared_gate``. ``dense_layers`` have no experts.
    With ``beside_mlp`` layers have a dense MLP as well (`looseleaf.models.layers.ExpertBranch`)."""

    num_experts: int
    top_k: int
    intermediate_size: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True
    scaling: float = 1.0
    selection_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_scores: Literal[1, 2] = 2
    num_shared: int = 0
    shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()
    beside_mlp: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "num_experts", "top_k", "intermediate_size", "scaling")
        require_positive(self, "num_groups")
        per_group, rest = divmod(self.num_experts, self.num_groups)
        enough = self.num_groups == 1 or per_group >= self.group_scores
        require(
            rest == 0 and enough,
            f"{self.num_experts} experts don't form {self.num_groups} equal groups of at least "
            f"{self.group_scores}",
        )
        require_each(
            self, f"from 1 to {self.num_groups}", lambda n: 0 < n <= self.num_groups, "top_groups"
        )
        most = per_group * self.top_groups
        require_each(self, f"from 1 to {most}", lambda k: 0 < k <= most, "top_k")

    @property
    def num_stored(self) -> int:
        """Experts of a layer, shared ones included."""
        return self.num_experts + self.num_shared

    @property
    def num_slots(self) -> int:
        """Experts that add to a row, shared ones included."""
        return self.top_k + self.num_shared
