"""From requests to tokenized prompts: where documents stand, and how their text is rendered.

Documents of a request's ``documents`` list stand in the last user message, before its own text, in
the order of the list. Documents inside a message stand where they are. How one is rendered depends
on nothing but its title and its text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from looseleaf.errors import EmptyDocument
from looseleaf.models.tokenizer.settings import DEFAULT_DOCUMENT_TEMPLATE
from looseleaf.models.tokenizer.tokenizer import Tokenizer
from looseleaf.prompt.builder import PromptBuilder
from looseleaf.prompt.request import Document, DocumentContext, PromptParts, SystemPrompt
from looseleaf.server.errors import ApiError
from looseleaf.server.protocol.chat import ChatMessage, DocumentContent, TextContent
from looseleaf.server.protocol.common import DocumentInput

PLAIN_TEMPLATE = "{text}"
TITLED_TEMPLATE = "{title}\n{text}"

_OF_A_TEXT = {
    "title": "leave title out",
    "context": "leave context out, or send its text here in the context that you want",
}


@dataclass(frozen=True)
class Label:
    """What a caller calls a document; the report names it so."""

    id: str | None
    title: str | None


@dataclass(frozen=True)
class MadePrompt:
    """A tokenized prompt and the labels of its documents, in the order in which they stand; of
    those that are read as text there is nothing to report."""

    parts: PromptParts
    labels: tuple[Label, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, documents included."""
        return sum(len(part.tokens) for part in self.parts)


def choose_template(given: str | None, tokenizer: Tokenizer) -> str:
    """The template in force: the operator's, or what suits the model's own form of documents."""
    if given is not None:
        return given
    own_form = tokenizer.document_template != DEFAULT_DOCUMENT_TEMPLATE
    return PLAIN_TEMPLATE if own_form else TITLED_TEMPLATE


def render_document(template: str, title: str | None, text: str) -> str:
    """A document's text; without a title, lines of the template that name it are left out."""
    lines = template.split("\n")
    kept = "\n".join(line for line in lines if title or "{title}" not in line or "{text}" in line)
    before, _, after = kept.partition("{text}")
    named = (part.replace("{title}", title or "") for part in (before, after))
    return text.join(named)


@dataclass(frozen=True)
class PromptMaker:
    """Makes the prompts of one tenant's requests; ``registered`` finds a document by its id.

    Tokenizing takes milliseconds a page: call it outside of an event loop."""

    builder: PromptBuilder
    template: str
    max_model_len: int
    registered: Callable[[str], Document]
    longest_token: int

    def chat(
        self,
        messages: Sequence[ChatMessage],
        documents: Sequence[DocumentInput],
        system_prompt: SystemPrompt | None,
    ) -> MadePrompt:
        """A conversation. Raises ApiError or InvalidRequest if it can't be one."""
        labels: list[Label] = []
        last = max((n for n, m in enumerate(messages) if m.role == "user"), default=None)
        if documents and last is None:
            raise ApiError(
                400,
                "documents are placed in the last user message, but there is none: add one",
                param="documents",
                code="invalid_value",
            )
        plain = []
        for number, message in enumerate(messages):
            content: list[Any] = []
            if number == last:
                content += [
                    self._document(d, f"documents.{n}", labels) for n, d in _each(documents)
                ]
            where = f"messages.{number}.content"
            content += self._content(message, where, labels)
            role = "system" if message.role == "developer" else message.role
            plain.append({"role": role, "content": content})
        self._check_length([m["content"] for m in plain])
        return MadePrompt(self.builder.from_messages(plain, system_prompt), tuple(labels))

    def completion(
        self,
        prompt: str | Sequence[int],
        documents: Sequence[DocumentInput],
        *,
        markers: bool = False,
    ) -> MadePrompt:
        """Documents, then a raw prompt; ``markers`` in it are text unless asked for.

        A text begins as the model's texts do, token ids are taken as they are."""
        labels: list[Label] = []
        parts: list[Any] = [
            self._document(d, f"documents.{n}", labels) for n, d in _each(documents)
        ]
        self._check_length([[*parts, prompt]])
        tokenizer = self.builder.tokenizer
        if isinstance(prompt, str):
            parts.append(prompt if markers else tokenizer.protect(prompt))
        else:
            parts.append([*prompt])
        return MadePrompt(self.builder.from_parts(parts), tuple(labels))

    def render(
        self, title: str | None, text: str | Sequence[str], context: DocumentContext = "lead"
    ) -> Document:
        """A document to be registered or placed; of several texts a collection, whose ``title`` is
        its name and stands in none of them. Raises EmptyDocument."""
        texts = [text] if isinstance(text, str) else text
        if not texts or not all(one.strip() for one in texts):
            raise EmptyDocument("the document is empty: leave it out, or give it some text")
        if isinstance(text, str):
            document = Document(render_document(self.template, title, text), title, context)
        else:
            each = [render_document(self.template, None, one) for one in text]
            document = Document(each, title, context)
        self._check_length([[document]])
        return document

    def _content(self, message: ChatMessage, where: str, labels: list[Label]) -> list[Any]:
        if isinstance(message.content, str):
            return [message.content]
        found: list[Any] = []
        for number, part in enumerate(message.content):
            if isinstance(part, TextContent):
                found.append(part.text)
            else:
                found.append(self._document(part, f"{where}.{number}", labels))
        return found

    def _document(
        self, given: DocumentInput | DocumentContent, where: str, labels: list[Label]
    ) -> Document:
        if given.text is not None:
            document = self.render(given.title, given.text, given.context or "lead")
            if document.context != "prompt":
                labels.append(Label(given.id, given.title))
            return document
        if given.id is None:
            raise ApiError(
                400,
                f"{where} has neither a text nor the id of a registered document: give one",
                param=where,
                code="invalid_value",
            )
        for name, advice in _OF_A_TEXT.items():
            if getattr(given, name) is not None:
                raise ApiError(
                    400,
                    f"{where} names a registered document, which has its own {name}: {advice}",
                    param=f"{where}.{name}",
                    code="invalid_value",
                )
        document = self.registered(given.id)
        labels.append(Label(given.id, document.name))
        return document

    def _check_length(self, contents: Sequence[Sequence[Any]]) -> None:
        """Refuses what is longer than the context however its text falls into tokens."""
        least = sum(self._fewest_tokens(item) for content in contents for item in content)
        if least > self.max_model_len:
            raise ApiError(
                400,
                f"the prompt has at least {least} tokens, but the context holds "
                f"{self.max_model_len}: shorten the documents or the text",
                code="context_length_exceeded",
            )

    def _fewest_tokens(self, item: str | Document | Sequence[int]) -> int:
        if isinstance(item, Document):
            return sum(map(self._fewest_tokens, item.texts))
        return len(item) // self.longest_token if isinstance(item, str) else len(item)


def longest_token(tokenizer: Tokenizer) -> int:
    """Most bytes that one ordinary token stands for."""
    special = tokenizer.special_token_ids
    ids = (i for i in range(tokenizer.vocab_size) if i not in special)
    return max((len(tokenizer.token_bytes(i)) for i in ids), default=1)


def _each(documents: Sequence[DocumentInput]) -> Sequence[tuple[int, DocumentInput]]:
    return list(enumerate(documents))
