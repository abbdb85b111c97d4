"""Blending: the choice of document tokens that a request computes again (CacheBlend).

A *selector* turns scores of candidate tokens into a choice within a *budget*. Its ``evidence``
names the source of the scores. Selectors are pure functions over tensors. `token_scoring` runs the
model and `fusion` keeps the patch. README.md has the algorithm and the file of each step."""

from looseleaf.blend.budget import Budget, choose
from looseleaf.blend.candidates import Candidates
from looseleaf.blend.row_filter import RowFilter
from looseleaf.blend.selectors.base import Chase, Selector
from looseleaf.blend.selectors.controls import Everything, Nothing, Oracle, RandomTokens
from looseleaf.blend.selectors.deviation import Deviation, kv_deviation
from looseleaf.blend.selectors.first_k import FirstK
from looseleaf.blend.selectors.links import Links
from looseleaf.blend.selectors.question import Question

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
