"""Where the parts of a prompt stand: one behind the other, or all documents at one place.

The second is APE's (arXiv 2502.05431): every document stands directly behind the text before the
first, as it was encoded, and the text behind them begins after the longest. Text reads documents as
a set of their own (`looseleaf.blend.ape`)."""

from collections.abc import Sequence
from itertools import pairwise

from looseleaf.config import ModelConfig
from looseleaf.errors import InvalidOption
from looseleaf.prompt.request import DocumentPart, Request, TextPart


def reads_apart(request: Request) -> bool:
    """Whether a request's documents stand at one place and are read apart from its text: empty
    ones leave nothing to read."""
    fuse = request.fuse
    return (
        fuse is not None
        and fuse.selector == "ape"
        and any(isinstance(part, DocumentPart) and part.tokens for part in request.parts)
    )


def starts_of(parts: Sequence[TextPart | DocumentPart], *, together: bool) -> list[int]:
    """The position of each part's first token; ``together`` puts all documents at one place."""
    starts, at, longest = [], 0, 0
    for part in parts:
        if together and isinstance(part, DocumentPart):
            starts.append(at)
            longest = max(longest, len(part.tokens))
            continue
        starts.append(at + longest)
        at, longest = at + longest + len(part.tokens), 0
    return starts


def require_apart(request: Request, model: ModelConfig) -> None:
    """Raises InvalidOption if documents can't be read apart in this request, or by this model."""
    fuse = request.fuse
    if not reads_apart(request) or fuse is None:
        return
    kinds = [isinstance(part, DocumentPart) for part in request.parts]
    if sum(before and not behind for before, behind in pairwise(kinds)) > 1:
        raise InvalidOption(
            "fuse 'ape' puts all documents at one place, so no text can stand "
            "between two of them: put it in front of the first or behind the last"
        )
    if request.select is not None and request.select.policy != "all":
        raise InvalidOption(
            "fuse 'ape' weighs a request's documents as a whole, and select reads only some of "
            "their pages: leave one of them out"
        )
    if model.soft_cap:
        raise InvalidOption(
            "fuse 'ape' tempers scores, which this model caps: choose another selector"
        )
