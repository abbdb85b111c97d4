"""How a request's policies are written: a word, or an object that also says how much."""

from typing import Annotated

from pydantic import Field

from looseleaf.config import FuseSelector
from looseleaf.server.protocol.base import Strict


class FuseInput(Strict):
    """Which tokens of reused documents are computed again, in their place, and how many."""

    selector: FuseSelector
    ratio: float | None = Field(None, ge=0, le=1, description="A share of the documents' tokens.")
    tokens: int | None = Field(
        None, ge=0, le=2**31, description="A number; for `first`, of each document."
    )
    threshold: float | None = Field(
        None, description="The score above which a token is computed again."
    )
    watched_share: float | None = Field(
        None, gt=0, le=1, description="Share of the layers, the last ones, that show what is read."
    )
    check_layers: Annotated[list[int], Field(min_length=1, max_length=1024)] | None = Field(
        None, description="Layers at which deviation is measured, rising, from 1."
    )


FusePolicy = FuseSelector | FuseInput
"""A selector's name alone takes its default budget."""
