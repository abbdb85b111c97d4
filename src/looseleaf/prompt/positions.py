"""The positions of a prompt's parts: consecutive, or with all documents at the same position.

The latter is APE (arXiv 2502.05431). Every document begins at the end of the text before the first
document, as it was encoded. The text after the documents begins at the end of the longest document.
Text reads documents as a separate set of keys (`looseleaf.blend.ape`)."""

from collections.abc import Sequence
from itertools import pairwise

from looseleaf.config import ModelConfig
from looseleaf.errors import InvalidOption
from looseleaf.prompt.request import DocumentPart, Request, TextPart


def reads_apart(request: Request) -> bool:
    """Whether a request uses APE and has a document with tokens."""
    fuse = request.fuse
    return (
        fuse is not None
        and fuse.selector == "ape"
        and any(isinstance(part, DocumentPart) and part.tokens for part in request.parts)
    )


def starts_of(parts: Sequence[TextPart | DocumentPart], *, together: bool) -> list[int]:
    """The position of each part's first token; ``together`` gives all documents the same start."""
    starts, position, longest = [], 0, 0
    for part in parts:
        if together and isinstance(part, DocumentPart):
            starts.append(position)
            longest = max(longest, len(part.tokens))
            continue
        starts.append(position + longest)
        position, longest = position + longest + len(part.tokens), 0
    return starts


def require_apart(request: Request, model: ModelConfig) -> None:
    """Raises InvalidOption if the request or the model does not permit APE."""
    fuse = request.fuse
    if not reads_apart(request) or fuse is None:
        return
    kinds = [isinstance(part, DocumentPart) for part in request.parts]
    if sum(before and not after for before, after in pairwise(kinds)) > 1:
        raise InvalidOption(
            "fuse 'ape' gives all documents the same position, so no text can be "
            "between two of them: put it before the first or after the last"
        )
    if request.select is not None and request.select.policy != "all":
        raise InvalidOption(
            "fuse 'ape' scales the attention to all documents, and select reads only a part of "
            "their pages: leave one of these options out"
        )
    if model.soft_cap:
        raise InvalidOption(
            "fuse 'ape' changes the temperature of scores, which this model caps: use another "
            "selector"
        )
