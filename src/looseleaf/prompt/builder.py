"""From prompts and conversations to tokens: parts, chat templates, BOS and documents' contexts.

The *lead* is the text before the first document. By default it is the context of every document. In
chat it is the system prompt and the header of the first user turn. An application's requests share
it, so a document is still computed once. It gives each document the beginning that the model was
trained with, instead of an attention sink per document."""

import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from looseleaf.errors import InvalidRequest
from looseleaf.models.tokenizer.tokenizer import Tokenizer
from looseleaf.prompt.messages import open_ended, plain_message, with_system_text
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
    """A document's tokens and their cached content."""

    document: weakref.ref[Document]
    ids: tuple[int, ...]
    content: DocumentContent


@dataclass(frozen=True)
class PromptBuilder:
    """Tokenizes prompts and conversations for a model; each `Document` object only once."""

    tokenizer: Tokenizer
    vocab_size: int
    # by object, not by text: so tokenization times reveal no other tenant's texts
    _encoded: dict[int, _Encoded] = field(default_factory=dict)

    def from_parts(self, prompt: Prompt) -> PromptParts:
        """The tokens of a raw prompt: BOS if the model has it, then the parts.

        Strings are template text, as in vLLM: markers in them are tokens. Markers in documents are
        characters. A prompt that begins with token ids gets no BOS. Raises InvalidRequest if the
        prompt is empty, ends with a document or has a part of another type.
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
        raw_parts = [prompt] if isinstance(prompt, str) else [*prompt]
        parts = [p if isinstance(p, str | Document) else self._checked_ids(p) for p in raw_parts]
        adds_bos = bool(raw_parts) and isinstance(raw_parts[0], str | Document)
        return self._assemble(parts, lead_length=None, adds_bos=adds_bos)

    def continued(
        self, prompt: PromptParts, continuation: str | Sequence[int]
    ) -> tuple[PromptParts, tuple[int, ...]]:
        """``prompt`` with a text or token ids after its end, and the ids of the continuation.

        The text is tokenized separately, so the prompt's tokens do not depend on it. Raises
        InvalidRequest for an empty continuation, and for other types."""
        last = prompt[-1]
        assert isinstance(last, TextPart), "a prompt ends with text"
        part = continuation if isinstance(continuation, str) else self._checked_ids(continuation)
        ids = tuple(self.checked([*self._ids_after(last.tokens, part)]))
        if not ids:
            raise InvalidRequest("a continuation is empty: give it at least one token")
        return (*prompt[:-1], replace(last, tokens=last.tokens + ids)), ids

    def with_bos(self, ids: list[int]) -> list[int]:
        """``ids`` after BOS, unless the model has no BOS or ``ids`` begin with it."""
        bos = self.tokenizer.bos_token_id
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def from_messages(
        self,
        messages: Sequence[Message],
        system_prompt: SystemPrompt | None = None,
        *,
        continues: bool = False,
        **variables: Any,
    ) -> PromptParts:
        """The tokens of a conversation in the checkpoint's chat template, up to the answer.

        With ``continues`` they end inside the last message, an assistant's, which the output goes
        on with.

        Users' text never becomes markers. Documents keep their positions in content lists.
        ``system_prompt`` is prepended to the system message, or becomes it. ``variables``, such as
        ``tools``, are the template's. Raises InvalidRequest."""
        if not messages:
            raise InvalidRequest("a conversation needs at least one message")
        malformed = next((m for m in messages if not isinstance(m, Mapping)), None)
        if malformed is not None:
            raise InvalidRequest(
                "a message is a dict with role and content, as in llm.chat([{'role': 'user', "
                f"'content': 'Who?'}}]), not {type(malformed).__name__}"
            )
        _check_system_prompt(system_prompt)
        if system_prompt is not None:
            joint = with_system_text(system_prompt.text, messages)
            whole = self.from_messages(joint, continues=continues, **variables)
            return _with_shared(whole, system_prompt.tokens)
        documents: list[Document] = []
        plain = [plain_message(message, documents) for message in messages]
        if continues:
            plain[-1] = open_ended(plain[-1])
            variables["add_generation_prompt"] = False
        first, *rest = self.tokenizer.cut_chat(plain, **variables)
        if continues:
            # the end of the message
            rest = rest[:-1]
        if len(rest) != len(documents):
            raise InvalidRequest(
                f"this model's chat template writes {len(rest)} documents where the conversation "
                f"has {len(documents)}: place the documents before the conversation's text"
            )
        lead = self.tokenizer.encode(first, special=True)
        parts: list[str | list[int] | Document] = [lead]
        for document, text in zip(documents, rest, strict=True):
            parts += [document, text]
        lead_length = self._lead_length(plain, lead, variables) if documents else None
        prompt = self._assemble(parts, lead_length)
        opens = variables.get("add_generation_prompt", True) is True
        return (*prompt[:-1], TextPart(prompt[-1].tokens, opens_answer=opens))

    def lead_length(
        self,
        messages: Sequence[Message],
        prompt: PromptParts,
        system_prompt: SystemPrompt | None = None,
        **variables: Any,
    ) -> int:
        """The length of the lead of ``prompt``, which is that of documents in ``messages``."""
        if not isinstance(prompt[0], TextPart):
            return 0
        if system_prompt is not None:
            messages = with_system_text(system_prompt.text, messages)
        plain = [plain_message(message, []) for message in messages]
        return self._lead_length(plain, [*prompt[0].tokens], variables)

    def system_prompt(self, text: str) -> SystemPrompt:
        """The tokens of a conversation that begins with the service's ``text``.

        Raises InvalidRequest if it is empty, or if the chat template ignores system messages."""
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
        """A prompt of the lead of a conversation, a document and an empty text.

        ``system`` is the conversation's own system text. Without a chat template the lead is BOS.
        Raises InvalidRequest for a document with ``context="prompt"``, which is unknown here."""
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
        parts: list[TextPart | DocumentPart] = [self._text(lead)] if lead else []
        parts += [self._document(document, tuple(lead), None, parts), TextPart(())]
        return _with_shared(tuple(parts), system_prompt.tokens if system_prompt else ())

    def _chat_lead(self, system: str | None) -> list[int]:
        """The tokens before the first user's text."""
        user = {"role": "user", "content": [{"type": "document"}]}
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        return self.checked(self.tokenizer.encode_chat([*messages, user])[0])

    def _lead_length(
        self,
        messages: list[dict[str, object]],
        first_run: list[int],
        variables: Mapping[str, Any],
    ) -> int:
        """The number of tokens of the first run before the first user's text."""
        first_user = next((n for n, m in enumerate(messages) if m["role"] == "user"), None)
        if first_user is None:
            return len(first_run)
        header = dict(messages[first_user], content=[{"type": "document"}])
        lead = self.tokenizer.encode_chat([*messages[:first_user], header], **variables)[0]
        return len(lead) if first_run[: len(lead)] == lead else len(first_run)

    def _assemble(
        self,
        parts: Sequence[str | list[int] | Document],
        lead_length: int | None,
        adds_bos: bool = False,
    ) -> PromptParts:
        """A prompt of template texts, token ids and documents. Raises InvalidRequest."""
        prompt: list[TextPart | DocumentPart] = []
        text: list[int] = self.with_bos([]) if adds_bos else []
        before: Sequence[int] = ()
        for part in parts:
            if isinstance(part, Document) and part.context != "prompt":
                if text:
                    prompt.append(self._text(text))
                text = []
                first = prompt[0].tokens if prompt and isinstance(prompt[0], TextPart) else ()
                prompt.append(self._document(part, first, lead_length, prompt))
                ids: Sequence[int] = prompt[-1].tokens
            else:
                ids = self._ids_after(before, part)
                if not before and text == [*ids[:1]]:
                    # the text contains BOS itself
                    text = []
                text += ids
            before = ids or before
        if not text:
            raise InvalidRequest(
                "the prompt must end with text: put the question behind the documents"
                if prompt
                else "the prompt is empty: give it some text"
            )
        return (*prompt, self._text(text))

    def _ids_after(self, before: Sequence[int], part: str | list[int] | Document) -> Sequence[int]:
        """The ids of ``part`` as text after the tokens ``before``; at the beginning if empty."""
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
        return TextPart(tuple(self.checked(ids)))

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
        encoded = self._encode(document)
        return DocumentPart(
            encoded.ids,
            lead if document.context == "lead" else bos_length,
            document.name or f"document {number}",
            encoded.content,
            document.tag,
        )

    def _encode(self, document: Document) -> _Encoded:
        object_id, cache = id(document), self._encoded
        cached = cache.get(object_id)
        if cached is not None and cached.document() is document:
            return cached
        if document.token_ids is not None:
            ids = tuple(self._checked_ids(document.token_ids))
        else:
            tokens: list[int] = []
            for text in document.texts:
                after = tokens[-1] if tokens else None
                tokens += self.tokenizer.encode_document(text, after)
            ids = tuple(self.checked(tokens))
        reference = weakref.ref(document, lambda _: cache.pop(object_id, None))
        cache[object_id] = _Encoded(reference, ids, DocumentContent())
        return cache[object_id]

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

    def checked(self, ids: list[int]) -> list[int]:
        """``ids`` of a text. Raises InvalidRequest for a token that the model lacks."""
        beyond = self._has_more_tokens and next((i for i in ids if i >= self.vocab_size), None)
        if beyond:
            raise InvalidRequest(
                f"the text has the token {self.tokenizer.written(beyond)!r} (id {beyond}), and the "
                f"model has {self.vocab_size} tokens: leave it out, or give the model as many "
                "embeddings as its tokenizer has tokens"
            )
        return ids


def num_characters(prompt: object) -> int:
    """The number of characters and token ids in a prompt or a conversation."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, Document):
        return sum(map(len, prompt.texts))
    if isinstance(prompt, Mapping):
        return sum(map(num_characters, prompt.values()))
    if not isinstance(prompt, list | tuple):
        return 0
    has_ids = bool(prompt) and isinstance(prompt[0], int)
    return len(prompt) if has_ids else sum(map(num_characters, prompt))


def _check_system_prompt(value: object) -> None:
    """Raises InvalidRequest for another type than SystemPrompt, such as a text."""
    if not isinstance(value, SystemPrompt | None):
        raise InvalidRequest(
            "a conversation's system_prompt is what hold_system_prompt(text) returned, not "
            f"{type(value).__name__}: call that once, or begin the conversation with a message "
            "of role 'system'"
        )


def _with_shared(parts: PromptParts, tokens: Sequence[int]) -> PromptParts:
    """``parts`` with ``num_shared`` set to the length of their common prefix with ``tokens``."""
    first = parts[0]
    if not isinstance(first, TextPart):
        return parts
    pairs = enumerate(zip(first.tokens, tokens, strict=False))
    length = next((n for n, (a, b) in pairs if a != b), min(len(first.tokens), len(tokens)))
    return (replace(first, num_shared=length), *parts[1:])
