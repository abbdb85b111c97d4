"""From requests to tokenized prompts: document order and document rendering.

The ``documents`` list precedes the text of the last user message. Documents inside a message keep
their position. Rendering depends on a document's title and text only, so requests share its tokens.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from looseleaf.config import Reuse
from looseleaf.errors import EmptyDocument
from looseleaf.models.tokenizer.settings import DEFAULT_DOCUMENT_TEMPLATE
from looseleaf.models.tokenizer.tokenizer import Tokenizer
from looseleaf.prompt.builder import PromptBuilder
from looseleaf.prompt.discover import Discovery
from looseleaf.prompt.request import (
    Document,
    DocumentContext,
    DocumentPart,
    PromptParts,
    SystemPrompt,
)
from looseleaf.router.tags import text_tag
from looseleaf.server.errors import ApiError
from looseleaf.server.protocol.chat import ChatMessage, DocumentContent, TextContent
from looseleaf.server.protocol.common import DocumentInput
from looseleaf.server.protocol.tools import ToolCall
from looseleaf.server.seen_texts import SeenTexts

PLAIN_TEMPLATE = "{text}"
TITLED_TEMPLATE = "{title}\n{text}"

_INLINE_ONLY = {
    "title": "leave title out",
    "context": "leave context out, or send its text here in the context that you want",
}


_Found = dict[str, Document]
"""Registered documents by id."""

_Place = tuple[str, DocumentInput | DocumentContent]
"""A document of a body, after its place in the body."""


@dataclass(frozen=True)
class Label:
    """The caller's id and title of a document, for the report.

    A discovered document has neither."""

    id: str | None = None
    title: str | None = None
    discovered: bool = False


@dataclass(frozen=True)
class TokenizedPrompt:
    """A tokenized prompt, and the labels of its documents in prompt order.

    Documents with the context ``prompt`` are text and have no label."""

    parts: PromptParts
    labels: tuple[Label, ...] = ()
    level: Reuse = "documents"

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, including documents."""
        return sum(len(part.tokens) for part in self.parts)


def choose_template(option: str | None, tokenizer: Tokenizer) -> str:
    """The operator's template, or a default that fits the model's document template."""
    if option is not None:
        return option
    has_own_template = tokenizer.document_template != DEFAULT_DOCUMENT_TEMPLATE
    return PLAIN_TEMPLATE if has_own_template else TITLED_TEMPLATE


def render_document(template: str, title: str | None, text: str) -> str:
    """A document's text; without a title, title lines of the template are omitted."""
    lines = template.split("\n")
    form = "\n".join(line for line in lines if title or "{title}" not in line or "{text}" in line)
    prefix, _, suffix = form.partition("{text}")
    return text.join(part.replace("{title}", title or "") for part in (prefix, suffix))


@dataclass(frozen=True)
class PromptMaker:
    """Makes the prompts of one ``salt``; ``registered`` returns documents by their ids.

    ``seen`` keeps the documents of earlier texts. ``reuse`` is the most reuse of the prompts;
    ``discover`` needs a ``discovery``.

    Tokenization takes milliseconds per page: call it outside of an event loop."""

    builder: PromptBuilder
    template: str
    max_model_len: int
    registered: Callable[[Sequence[str]], list[Document]]
    longest_token: int
    salt: str
    seen: SeenTexts
    reuse: Reuse = "documents"
    discovery: Discovery | None = None

    def chat(
        self,
        messages: Sequence[ChatMessage],
        documents: Sequence[DocumentInput],
        system_prompt: SystemPrompt | None,
        **variables: Any,
    ) -> TokenizedPrompt:
        """The prompt of a conversation; ``variables`` are the chat template's.

        Raises ApiError or InvalidRequest."""
        labels: list[Label] = []
        last_user = max((n for n, m in enumerate(messages) if m.role == "user"), default=None)
        if documents and last_user is None:
            raise ApiError(
                400,
                "documents are placed in the last user message, but there is none: add one",
                param="documents",
                code="invalid_value",
            )
        inline = [
            (f"messages.{number}.content.{place}", part)
            for number, message in enumerate(messages)
            if isinstance(message.content, list)
            for place, part in enumerate(message.content)
            if isinstance(part, DocumentContent)
        ]
        by_id = self._find([*_places(documents), *inline])
        rendered = []
        for number, message in enumerate(messages):
            content: list[Any] = []
            if number == last_user:
                content += self._documents(documents, labels, by_id)
            content += self._content(message, labels, by_id)
            rendered.append(_rendered(message, content))
        self._check_length([message["content"] or () for message in rendered])
        parts = self.builder.from_messages(rendered, system_prompt, **variables)
        if self.reuse != "discover":
            return TokenizedPrompt(parts, tuple(labels), self.reuse)
        lead_length = self.builder.lead_length(rendered, parts, system_prompt, **variables)
        return self._discovered(parts, lead_length, labels)

    def completion(
        self,
        prompt: str | Sequence[int],
        documents: Sequence[DocumentInput],
        *,
        markers: bool = False,
    ) -> TokenizedPrompt:
        """Documents, then a raw prompt; its special tokens are text unless ``markers``.

        A text gets the model's begin-of-text token, token ids are used unchanged."""
        labels: list[Label] = []
        parts: list[Any] = self._documents(documents, labels, self._find(_places(documents)))
        self._check_length([[*parts, prompt]])
        tokenizer = self.builder.tokenizer
        if isinstance(prompt, str):
            parts.append(prompt if markers else tokenizer.protect(prompt))
        else:
            parts.append([*prompt])
        prompt_parts = self.builder.from_parts(parts)
        if self.reuse != "discover":
            return TokenizedPrompt(prompt_parts, tuple(labels), self.reuse)
        return self._discovered(prompt_parts, 0, labels)

    def _discovered(
        self, parts: PromptParts, lead_length: int, labels: Sequence[Label]
    ) -> TokenizedPrompt:
        assert self.discovery is not None, "the level discover has a discovery"
        pieces = self.discovery.apply(parts, lead_length, self.salt)
        own, documents = iter(labels), [p for p in pieces if isinstance(p, DocumentPart)]
        every = [Label(discovered=True) if part.discovered else next(own) for part in documents]
        return TokenizedPrompt(pieces, tuple(every), self.reuse)

    def render(
        self, title: str | None, text: str | Sequence[str], context: DocumentContext = "lead"
    ) -> Document:
        """A document, or a collection for several texts, which omit ``title``.

        Raises EmptyDocument, and ApiError beyond the context."""
        kept = text if isinstance(text, str) else tuple(text)
        key = (self.salt, title, context, kept)
        return self.seen.document(key, lambda: self._render(title, kept, context))

    def _render(
        self, title: str | None, text: str | tuple[str, ...], context: DocumentContext
    ) -> Document:
        texts = [text] if isinstance(text, str) else text
        if not texts or not all(item.strip() for item in texts):
            raise EmptyDocument("the document is empty: leave it out, or give it some text")
        if isinstance(text, str):
            rendered_text = render_document(self.template, title, text)
            document = Document(rendered_text, title, context, tag=text_tag(title, text))
        else:
            rendered = [render_document(self.template, None, item) for item in text]
            document = Document(rendered, title, context)
        self._check_length([[document]])
        return document

    def _content(self, message: ChatMessage, labels: list[Label], by_id: _Found) -> list[Any]:
        if message.content is None or isinstance(message.content, str):
            return [] if message.content is None else [message.content]
        return [
            part.text if isinstance(part, TextContent) else self._document(part, labels, by_id)
            for part in message.content
        ]

    def _documents(
        self, bodies: Sequence[DocumentInput], labels: list[Label], by_id: _Found
    ) -> list[Document]:
        return [self._document(body, labels, by_id) for body in bodies]

    def _document(
        self, body: DocumentInput | DocumentContent, labels: list[Label], by_id: _Found
    ) -> Document:
        if body.text is not None:
            context = "prompt" if self.reuse == "exact" else body.context or "lead"
            document = self.render(body.title, body.text, context)
            if document.context != "prompt":
                labels.append(Label(body.id, body.title))
            return document
        assert body.id is not None, "_find refuses a document without a text and an id"
        document = by_id[body.id]
        if self.reuse == "exact":
            return replace(document, context="prompt")
        labels.append(Label(body.id, document.name))
        return document

    def _find(self, bodies: Sequence[_Place]) -> _Found:
        """The registered documents among ``bodies``. Raises ApiError and DocumentNotFound."""
        for where, body in bodies:
            if body.text is None:
                _check_registered(where, body)
            else:
                _check_text(where, body.text)
        ids = list(dict.fromkeys(b.id for _, b in bodies if b.text is None and b.id is not None))
        return dict(zip(ids, self.registered(ids), strict=True)) if ids else {}

    def _check_length(self, contents: Sequence[Sequence[Any]]) -> None:
        """Refuses a prompt that exceeds the context under every tokenization of its text."""
        min_tokens = sum(self._min_tokens(item) for content in contents for item in content)
        if min_tokens > self.max_model_len:
            raise ApiError(
                400,
                f"the prompt has at least {min_tokens} tokens, but the context holds "
                f"{self.max_model_len}: shorten the documents or the text",
                code="context_length_exceeded",
            )

    def _min_tokens(self, item: str | Document | Sequence[int]) -> int:
        if isinstance(item, Document):
            return sum(map(self._min_tokens, item.texts))
        return len(item) // self.longest_token if isinstance(item, str) else len(item)


def _places(documents: Sequence[DocumentInput]) -> list[_Place]:
    return [(f"documents.{number}", body) for number, body in enumerate(documents)]


def _check_text(where: str, text: str) -> None:
    """Raises ApiError (400) for a blank text."""
    if not text or text.isspace():
        raise ApiError(
            400,
            f"{where} is empty: leave it out, or give it some text",
            param=f"{where}.text",
            code="invalid_value",
        )


def _check_registered(where: str, body: DocumentInput | DocumentContent) -> None:
    """Raises ApiError (400) unless a body without a text names a registered document."""
    if body.id is None:
        raise ApiError(
            400,
            f"{where} has neither a text nor the id of a registered document: give one",
            param=where,
            code="invalid_value",
        )
    for name, advice in _INLINE_ONLY.items():
        if getattr(body, name) is not None:
            raise ApiError(
                400,
                f"{where} names a registered document, which has its own {name}: {advice}",
                param=f"{where}.{name}",
                code="invalid_value",
            )


def _rendered(message: ChatMessage, content: list[Any]) -> dict[str, Any]:
    """A message in the form of chat templates, whose calls have objects as arguments."""
    role = "system" if message.role == "developer" else message.role
    rendered: dict[str, Any] = {"role": role, "content": content or None}
    thought = message.reasoning_content or message.reasoning
    for name, value in (
        ("name", message.name),
        ("tool_call_id", message.tool_call_id),
        ("reasoning_content", thought),
    ):
        if value is not None:
            rendered[name] = value
    if message.tool_calls:
        rendered["tool_calls"] = [_rendered_call(call) for call in message.tool_calls]
    return rendered


def _rendered_call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments: Any = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        # the model reads its own broken call
        arguments = call.function.arguments
    function = {"name": call.function.name, "arguments": arguments}
    rendered = {"type": "function", "function": function}
    return rendered if call.id is None else {"id": call.id, **rendered}


def longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token that is not special."""
    special = tokenizer.special_token_ids
    ids = (i for i in range(tokenizer.vocab_size) if i not in special)
    return max((len(tokenizer.token_bytes(i)) for i in ids), default=1)
