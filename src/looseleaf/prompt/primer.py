"""The defaults of a model's requests: a blending policy, and a primer before each document.

A document that is computed directly after its context differs from the same document after other
documents: its first tokens take part of the attention that belongs to the beginning of the prompt,
and its texts lack what usual neighbours add. A *primer* is text in the form of documents, which a
document reads when it is computed, and which no request reads. It depends on the model only, so
documents keep their identity in any order, and reading them costs nothing more. The first document
of a prompt follows no other, so it is read as it is without a primer."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from looseleaf.config import SCORING, Fuse
from looseleaf.models.tokenizer.tokenizer import Tokenizer
from looseleaf.prompt.request import DocumentPart, PromptParts, Request


def primer_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[int, ...]:
    """The tokens of a primer, each text in the model's form of a document."""
    tokens: list[int] = []
    for text in texts:
        tokens += tokenizer.encode_document(text, tokens[-1] if tokens else None)
    return tuple(tokens)


@dataclass(frozen=True)
class RequestDefaults:
    """``fuse`` for requests that name no blending policy, the tokens of the ``primer``, and the
    ``anchors`` of selections that name none.

    Documents that end after ``max_length`` tokens with their context and the primer have none."""

    fuse: Fuse | None = None
    primer: tuple[int, ...] = ()
    max_length: int = 0
    anchors: tuple[int, ...] | None = None
    # a primer per length of context, since its part caches its keys
    _primers: dict[int, DocumentPart] = field(default_factory=dict, compare=False, repr=False)

    def applied(self, request: Request) -> Request:
        """``request`` with these defaults.

        Host-resident documents are indexed by their own keys, so retrieval takes no defaults."""
        if request.canary or (request.select and request.select.policy == "retrieval"):
            return request
        if self.fuse is not None and request.fuse is None and not request.warms:
            request = replace(request, fuse=self.fuse)
        if self.anchors is not None and request.select is not None and _shares_choices(request):
            request = replace(request, select=replace(request.select, anchors=self.anchors))
        return replace(request, parts=self.primed(request.parts)) if self.primer else request

    def primed(self, parts: PromptParts) -> PromptParts:
        """``parts`` with the primer before each document that has none."""
        return tuple(
            replace(part, primer=self._primer(part.context_length))
            if isinstance(part, DocumentPart) and part.primer is None and self._fits(part)
            else part
            for part in parts
        )

    def _fits(self, part: DocumentPart) -> bool:
        length = part.context_length + len(self.primer) + len(part.tokens)
        return bool(part.tokens) and length <= self.max_length

    def _primer(self, context_length: int) -> DocumentPart:
        if context_length not in self._primers:
            part = DocumentPart(self.primer, context_length, "(primer)")
            self._primers[context_length] = part
        return self._primers[context_length]


def _shares_choices(request: Request) -> bool:
    """Whether layers of the request may share a choice of pages, and no anchors are named."""
    select, revise = request.select, request.revise
    return (
        select is not None
        and select.policy in SCORING
        and select.anchors is None
        and select.layer_budgets == "flat"
        and (revise is None or revise.window == 1)
    )
