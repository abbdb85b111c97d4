"""Blending: the choice of document tokens that a request computes again (CacheBlend).

A *selector* turns scores of candidate tokens into a choice within a *budget*. Its ``evidence``
names the source of the scores. Selectors are pure functions over tensors. `token_scoring` runs the
model and `fusion` keeps the patch. README.md has the algorithm and the file of each step."""

from looseleaf.blend.budget import Budget, choose
from looseleaf.blend.candidates import Candidates, Selector
from looseleaf.blend.row_filter import RowFilter
from looseleaf.blend.selectors.deviation import Deviation, kv_deviation
from looseleaf.blend.selectors.everything import Everything
from looseleaf.blend.selectors.first_k import FirstK
from looseleaf.blend.selectors.links import Chase, Links
from looseleaf.blend.selectors.nothing import Nothing
from looseleaf.blend.selectors.oracle import Oracle
from looseleaf.blend.selectors.question import Question
from looseleaf.blend.selectors.random_tokens import RandomTokens

__all__ = [
    "Budget",
    "Candidates",
    "Chase",
    "Deviation",
    "Everything",
    "FirstK",
    "Links",
    "Nothing",
    "Oracle",
    "Question",
    "RandomTokens",
    "RowFilter",
    "Selector",
    "choose",
    "kv_deviation",
]
