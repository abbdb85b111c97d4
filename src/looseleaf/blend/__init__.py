"""Which tokens of reused documents are computed again when the documents meet in one request.

Pure functions over tensors. A *selector* (one file each) turns the scores of the candidates into
tokens, within a *budget*; where its scores come from is its ``evidence``. Running the model, and
keeping patches and masking what they replace is left to the engine, which calls in between layers
through ``RowFilter``.
"""

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
