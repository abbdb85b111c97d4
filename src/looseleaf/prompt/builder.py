"""From what a caller wrote to tokens: parts, chat messages, templates, BOS, and what documents may
see.

The *lead* is the text before the first document. Documents are computed behind it by default: in
chat it is the system prompt and the header of the first user turn, the same for every request of an
application, so a document is still computed once; and it gives each document the beginning the
model was trained to see, instead of one attention sink per document."""

import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from looseleaf.errors import InvalidRequest
from looseleaf.models.tokenizer.tokenizer import Tokenizer
from looseleaf.prompt.request import (
    Document,
    DocumentContent,
    DocumentPart,
    Message,
    Prompt,
    PromptParts,
    SystemPrompt,
    TextPart,
)


class _Encoded(NamedTuple):
    """A document's tokens, and what is made of them once."""

    document: weakref.ref[Document]
    ids: tuple[int, ...]
    content: DocumentContent


@dataclass(frozen=True)
class PromptBuilder:
    """Tokenizes prompts and conversations for one model; a `Document` once, for as long as its
    owner holds it."""

    tokenizer: Tokenizer
    vocab_size: int
    # by object and not by text: how long it takes tells nobody what somebody else has sent
    _encoded: dict[int, _Encoded] = field(default_factory=dict)

    def from_parts(self, prompt: Prompt) -> PromptParts:
        """A raw prompt: BOS if the model's texts begin with it, then the parts as they are.

        Strings are template text, as in vLLM: markers in them are tokens. Documents never are.
        A prompt whose first part is token ids gets no BOS: who makes tokens makes all of them.
        Raises InvalidRequest if the prompt is empty, ends with a document, or holds something else.
        """
        if isinstance(prompt, Mapping | Set):
            raise InvalidRequest(
                f"a prompt is a string or a list of parts, not {type(prompt).__name__}: messages "
                "are for llm.chat"
            )
        if isinstance(prompt, Document) or not isinstance(prompt, Iterable):
            raise InvalidRequest(
                f"a prompt is a string or a list of parts, not {type(prompt).__name__}: write it "
                "as in [document, 'question']"
            )
        given = [prompt] if isinstance(prompt, str) else [*prompt]
        parts = [p if isinstance(p, str | Document) else self._checked_ids(p) for p in given]
        begins = bool(given) and isinstance(given[0], str | Document)
        return self._assemble(parts, lead_length=None, begins=begins)

    def with_bos(self, ids: list[int]) -> list[int]:
        """``ids`` of a text behind BOS, if the model's texts begin with it and this does not."""
        bos = self.tokenizer.bos_token_id
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def from_messages(
        self, messages: Sequence[Message], system_prompt: SystemPrompt | None = None
    ) -> PromptParts:
        """A conversation by the checkpoint's chat template, ready for the assistant's turn.

        Text from users never yields markers. Documents inside a content list are placed where they
        stand. ``system_prompt`` comes first: as the system message if the conversation has none,
        else in it, before the text that stands there."""
        if not messages:
            raise InvalidRequest("a conversation needs at least one message")
        other = next((m for m in messages if not isinstance(m, Mapping)), None)
        if other is not None:
            raise InvalidRequest(
                "a message is a dict with role and content, as in llm.chat([{'role': 'user', "
                f"'content': 'Who?'}}]), not {type(other).__name__}"
            )
        _check_system_prompt(system_prompt)
        if system_prompt is not None:
            whole = self.from_messages(_behind(system_prompt.text, messages))
            return _sharing(whole, system_prompt.tokens)
        documents: list[Document] = []
        plain = [_plain_message(message, documents) for message in messages]
        first, *behind = self.tokenizer.cut_chat(plain)
        if len(behind) != len(documents):
            raise InvalidRequest(
                f"this model's chat template writes {len(behind)} documents where the conversation "
                f"has {len(documents)}: place the documents before the conversation's text"
            )
        lead = self.tokenizer.encode(first, special=True)
        parts: list[str | list[int] | Document] = [lead]
        for document, text in zip(documents, behind, strict=True):
            parts += [document, text]
        made = self._assemble(parts, self._lead_length(plain, lead) if documents else None)
        return (*made[:-1], TextPart(made[-1].tokens, opens_answer=True))

    def system_prompt(self, text: str) -> SystemPrompt:
        """The service's ``text`` as the beginning of a conversation.

        Raises InvalidRequest if it is empty, or if the chat template has no place for it."""
        if not isinstance(text, str):
            raise InvalidRequest(f"a system prompt is a string, not {type(text).__name__}")
        if not text.strip():
            raise InvalidRequest("a system prompt must not be empty: leave it out instead")
        lead = self._chat_lead(text)
        if lead == self._chat_lead(None):
            raise InvalidRequest(
                "this model's chat template leaves system messages out: put the text into the "
                "users' messages"
            )
        return SystemPrompt(text, tuple(lead))

    def from_document(
        self,
        document: Document,
        system_prompt: SystemPrompt | None = None,
        system: str | None = None,
    ) -> PromptParts:
        """A document behind the lead it would have in a conversation, and an empty end.

        ``system`` is the conversation's own system text, if it has any. For a model without a chat
        template the lead is what every text begins with. Raises InvalidRequest for a document whose
        context is the whole prompt, since that is not known yet."""
        if not isinstance(document, Document):
            raise InvalidRequest(
                f"only a Document can be computed ahead, not {type(document).__name__}: make one "
                "of the text, as in Document(text)"
            )
        _check_system_prompt(system_prompt)
        if document.context == "prompt":
            raise InvalidRequest(
                "a document with context='prompt' is part of one prompt and can't be computed "
                "ahead: register it with context='lead' or 'alone'"
            )
        if document.context == "lead" and self.tokenizer.has_chat_template:
            texts = [t for t in (system_prompt.text if system_prompt else None, system) if t]
            lead = self._chat_lead("\n\n".join(texts) or None)
        else:
            lead = [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
        made: list[TextPart | DocumentPart] = [self._text(lead)] if lead else []
        made += [self._document(document, tuple(lead), None, made), TextPart(())]
        return _sharing(tuple(made), system_prompt.tokens if system_prompt else ())

    def _chat_lead(self, system: str | None) -> list[int]:
        """What stands before the first user's words."""
        user = {"role": "user", "content": [{"type": "document"}]}
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        return self.known(self.tokenizer.encode_chat([*messages, user])[0])

    def _lead_length(self, messages: list[dict[str, object]], first_run: list[int]) -> int:
        """How much of the first run stands before anything the user wrote."""
        first_user = next((n for n, m in enumerate(messages) if m["role"] == "user"), None)
        if first_user is None:
            return len(first_run)
        header = dict(messages[first_user], content=[{"type": "document"}])
        lead = self.tokenizer.encode_chat([*messages[:first_user], header])[0]
        return len(lead) if first_run[: len(lead)] == lead else len(first_run)

    def _assemble(
        self,
        parts: Sequence[str | list[int] | Document],
        lead_length: int | None,
        begins: bool = False,
    ) -> PromptParts:
        """A prompt of template texts, token ids and documents; one that ``begins`` gets BOS."""
        made: list[TextPart | DocumentPart] = []
        text: list[int] = self.with_bos([]) if begins else []
        before: Sequence[int] = ()
        for part in parts:
            if isinstance(part, Document) and part.context != "prompt":
                if text:
                    made.append(self._text(text))
                text = []
                first = made[0].tokens if made and isinstance(made[0], TextPart) else ()
                made.append(self._document(part, first, lead_length, made))
                ids: Sequence[int] = made[-1].tokens
            else:
                ids = self._ids_behind(before, part)
                if not before and text == [*ids[:1]]:
                    # the text names BOS itself
                    text = []
                text += ids
            before = ids or before
        if not text:
            raise InvalidRequest(
                "the prompt must end with text: put the question behind the documents"
                if made
                else "the prompt is empty: give it some text"
            )
        return (*made, self._text(text))

    def _ids_behind(self, before: Sequence[int], part: str | list[int] | Document) -> Sequence[int]:
        """The ids of ``part`` as text behind the tokens ``before``, the beginning if none."""
        if isinstance(part, list):
            return part
        if isinstance(part, str):
            return self._encode_text(part, before)
        if part.token_ids is not None or self.tokenizer.is_middle(before):
            return self._encode(part).ids
        ids: list[int] = []
        for text in part.texts:
            ids += self._encode_text(self.tokenizer.document_text(text), ids or before)
        return ids

    def _encode_text(self, text: str, before: Sequence[int]) -> list[int]:
        if not before:
            return self.tokenizer.encode(text, special=True)
        return self.tokenizer.encode_continuation(text, special=True, after=before[-1])

    def _text(self, ids: list[int]) -> TextPart:
        return TextPart(tuple(self.known(ids)))

    def _document(
        self,
        document: Document,
        first_text: tuple[int, ...],
        lead_length: int | None,
        before: Sequence[TextPart | DocumentPart],
    ) -> DocumentPart:
        number = sum(isinstance(part, DocumentPart) for part in before) + 1
        bos_length = int(first_text[:1] == (self.tokenizer.bos_token_id,))
        lead = len(first_text) if lead_length is None else lead_length
        known = self._encode(document)
        return DocumentPart(
            known.ids,
            lead if document.context == "lead" else bos_length,
            document.name or f"document {number}",
            known.content,
        )

    def _encode(self, document: Document) -> _Encoded:
        number, encoded = id(document), self._encoded
        known = encoded.get(number)
        if known is not None and known.document() is document:
            return known
        if document.token_ids is not None:
            ids = tuple(self._checked_ids(document.token_ids))
        else:
            tokens: list[int] = []
            for text in document.texts:
                after = tokens[-1] if tokens else None
                tokens += self.tokenizer.encode_document(text, after)
            ids = tuple(self.known(tokens))
        reference = weakref.ref(document, lambda _: encoded.pop(number, None))
        encoded[number] = _Encoded(reference, ids, DocumentContent())
        return encoded[number]

    def _checked_ids(self, part: object) -> list[int]:
        kinds = set(map(type, part)) if isinstance(part, Sequence) else set()
        if not isinstance(part, Sequence) or not all(issubclass(kind, int) for kind in kinds):
            raise InvalidRequest(
                "a prompt part is a string, a Document or a list of token ids, "
                f"not {type(part).__name__}"
                + (": put the ids into a list of their own" if isinstance(part, int) else "")
            )
        ids = [*part] if kinds <= {int} else [int(i) for i in part]
        beyond = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if beyond is not None:
            raise InvalidRequest(
                f"token id {beyond} is outside the model's vocabulary of {self.vocab_size}: use "
                "ids of this model's tokenizer"
            )
        return ids

    @cached_property
    def _has_more_tokens(self) -> bool:
        return self.tokenizer.last_token_id >= self.vocab_size

    def known(self, ids: list[int]) -> list[int]:
        """``ids`` of a text. Raises InvalidRequest for a token that the model does not have."""
        beyond = self._has_more_tokens and next((i for i in ids if i >= self.vocab_size), None)
        if beyond:
            raise InvalidRequest(
                f"the text has the token {self.tokenizer.written(beyond)!r} (id {beyond}), and the "
                f"model has {self.vocab_size} tokens: leave it out, or give the model as many "
                "embeddings as its tokenizer has tokens"
            )
        return ids


def num_characters(given: object) -> int:
    """Characters of all texts in a prompt or a conversation, and the token ids in it; of what is
    neither nothing is counted."""
    if isinstance(given, str):
        return len(given)
    if isinstance(given, Document):
        return sum(map(len, given.texts))
    if isinstance(given, Mapping):
        return sum(map(num_characters, given.values()))
    if not isinstance(given, list | tuple):
        return 0
    ids = bool(given) and isinstance(given[0], int)
    return len(given) if ids else sum(map(num_characters, given))


def _check_system_prompt(given: object) -> None:
    """Raises InvalidRequest for a text: it is computed once, and not for each conversation."""
    if not isinstance(given, SystemPrompt | None):
        raise InvalidRequest(
            "a conversation's system_prompt is what hold_system_prompt(text) returned, not "
            f"{type(given).__name__}: call that once, or begin the conversation with a message "
            "of role 'system'"
        )


def _behind(text: str, messages: Sequence[Message]) -> list[Message]:
    """``messages`` with ``text`` at the beginning of their system message, or as one."""
    first = messages[0]
    if first.get("role") != "system":
        return [{"role": "system", "content": text}, *messages]
    own = first.get("content")
    if own is None:
        # refused like any other message without content
        return [*messages]
    content = [own] if isinstance(own, str | Document) else [*own]
    joint = text + "\n\n" if content != [""] else text
    return [{**first, "content": [joint, *content]}, *messages[1:]]


def _sharing(parts: PromptParts, tokens: Sequence[int]) -> PromptParts:
    """``parts`` whose beginning, as far as it is ``tokens``, belongs to the service."""
    first = parts[0]
    if not isinstance(first, TextPart):
        return parts
    pairs = enumerate(zip(first.tokens, tokens, strict=False))
    same = next((n for n, (a, b) in pairs if a != b), min(len(first.tokens), len(tokens)))
    return (replace(first, num_shared=same), *parts[1:])


def _plain_message(message: Message, documents: list[Document]) -> dict[str, object]:
    """``message`` with OpenAI-style content; its documents are appended to ``documents`` in
    order.
    """
    content = message.get("content")
    if isinstance(content, Document):
        content = [content]
    if not isinstance(content, list | tuple):
        return dict(message)
    parts: list[object] = []
    for part in content:
        if isinstance(part, Document):
            documents.append(part)
            parts.append({"type": "document"})
        elif isinstance(part, dict) and part.get("type") == "document":
            documents.append(_document_of(part))
            parts.append({"type": "document"})
        else:
            parts.append({"type": "text", "text": part} if isinstance(part, str) else part)
    return dict(message, content=parts)


def _document_of(part: Mapping[str, Any]) -> Document:
    """The document of a part of a message. Raises InvalidRequest for what it does not have here,
    and what `Document` raises."""
    unknown = set(part) - {"type", "text", "title", "context"}
    if unknown:
        raise InvalidRequest(
            f"a document in a message has text, title and context, not {min(unknown)}: leave it "
            "out; what is registered is found by its text"
        )
    return Document(part.get("text", ""), part.get("title"), part.get("context") or "lead")
