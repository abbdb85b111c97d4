"""The checkpoint's tokenizer: text to ids and back, templates, BOS and end tokens.

Users' text and template text never mix. A marker is characters in users' text and a token in
template text. ``encode`` adds no BOS; callers prepend ``bos_token_id``.
"""

import json
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from looseleaf.errors import CorruptCheckpoint, InvalidRequest, UnsupportedModel
from looseleaf.models.checkpoint.checkpoint import shortened
from looseleaf.models.checkpoint.files import TOKENIZER, parse_json, read_text
from looseleaf.models.tokenizer.added_tokens import (
    make_special,
    ordinary_tokens,
    require_short,
    special_tokens,
)
from looseleaf.models.tokenizer.beginnings import behind_marker, in_the_middle, prepends
from looseleaf.models.tokenizer.chat_template import (
    OPEN,
    ChatTemplate,
    Message,
    Protector,
    protect_messages,
)
from looseleaf.models.tokenizer.detokenizer import Detokenizer, TokenBytes
from looseleaf.models.tokenizer.guarded_backend import GuardedBackend, make_sandbox
from looseleaf.models.tokenizer.limits import require_limits
from looseleaf.models.tokenizer.marked_text import MarkerCutter, cut_at_documents
from looseleaf.models.tokenizer.settings import TokenizerSettings
from looseleaf.models.tokenizer.template_markers import is_ordinary
from looseleaf.sandbox import Sandbox
from looseleaf.sandbox.encoding import LONG_TEXT as LONG_TEXT
from looseleaf.sandbox.encoding import ids_of, is_linear, load_backend, spans_of

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend


class Tokenizer:
    """An immutable tokenizer from ``tokenizer.json`` and the files beside it.

    Plain texts begin with ``bos_token_id`` unless it is None. ``eos_token_ids`` end an answer.
    A tokenizer without a linear time bound encodes in a sandbox. Safe to share between threads.
    Raises CorruptCheckpoint and UnsupportedModel.
    """

    _sandbox: Sandbox | None = None

    def __init__(self, folder: Path) -> None:
        self._path = folder / "tokenizer.json"
        self._source = read_text(self._path, TOKENIZER)
        described = parse_json(self._source, self._path, limits=TOKENIZER)
        require_limits(described, self._path)
        self._plain = self._backend(self._source, markers_are_text=True)
        self._settings = TokenizerSettings(folder)
        self.named_tokens = self._settings.named_tokens
        self._chat_templates = self._settings.chat_templates()
        self.document_template = self._settings.document_template
        # as in Transformers
        changed = make_special(described, {*self.named_tokens.values()})
        special = special_tokens(described)
        written = {*filter(self._is_written, ordinary_tokens(described))}
        # markers that a template writes must not come from users' text, special or not
        if make_special(described, written) or changed:
            self._source = json.dumps(described, ensure_ascii=False)
            self._plain = self._backend(self._source, markers_are_text=True)
        self._source_behind = self._rewritten(described, behind_marker(described))
        self._source_middle = self._rewritten(described, in_the_middle(described))
        if not is_linear(described):
            self._sandbox = make_sandbox(lambda: [*self._sources])
            self._plain = self._backend(self._source, markers_are_text=True)
        self._require_tokens(folder)
        self._read_markers(described, written)
        self.special_token_ids = frozenset(
            i for i, token in self._markers.items() if token.content in special
        )
        try:
            self._token_bytes = TokenBytes(described.get("decoder"), self._plain.id_to_token)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{self._path}: {error}") from error
        self.bos_token_id = self._derive_bos()
        self.eos_token_ids = self._derive_eos()

    def _read_markers(self, described: Mapping[str, Any], written: Set[str]) -> None:
        """Set the markers and their protectors."""
        added = self._plain.get_added_tokens_decoder()
        self._markers = {i: token for i, token in added.items() if token.special}
        contents = {token.content for token in self._markers.values()}
        try:
            require_short(contents)
        except CorruptCheckpoint as error:
            raise CorruptCheckpoint(f"{self._path}: {error}") from error
        self._has_lookalikes = bool(described.get("normalizer")) and any(
            token.normalized for token in self._markers.values()
        )
        # the library splits a text at these tokens before it normalizes, and so before a prepend
        has_prepend = prepends(described)
        self._separators = {
            i: token
            for i, token in added.items()
            if token.special or (has_prepend and not token.normalized)
        }
        self._protector = Protector(contents)
        self._answer_protector = Protector(
            contents - {token for token in written if self._is_searched(token)}
        )
        self._cutter = MarkerCutter(self._separators, self._protector)

    @property
    def vocab_size(self) -> int:
        return self._plain.get_vocab_size(with_added_tokens=True)

    @cached_property
    def last_token_id(self) -> int:
        """The largest id that `encode` may return."""
        return max(self._plain.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_templates)

    def chat_template_source(self, *, tools: bool = False) -> str:
        """The Jinja source of the chat template, the one for ``tools`` if there are two.

        Raises InvalidRequest without a chat template."""
        return self._chat_template("tool_use" if tools else "default").source

    @property
    def sandboxes(self) -> list[Sandbox]:
        """The sandboxes that render and encode; closing them ends their processes."""
        own = [] if self._sandbox is None else [self._sandbox]
        return [*own, *(template.sandbox for template in self._chat_templates.values())]

    @property
    def is_bounded(self) -> bool:
        """Whether the time to tokenize a chat or a short text is bounded by its size."""
        return self._sandbox is None and all(t.is_plain for t in self._chat_templates.values())

    @property
    def needs_sandbox(self) -> bool:
        """Whether texts are encoded in a sandbox, which is too slow for the engine's thread."""
        return self._sandbox is not None

    def token_id(self, token: str) -> int | None:
        """The id of a token by its written form; None if unknown."""
        token_id: int | None = self._plain.token_to_id(token)
        return token_id

    @property
    def added_token_ids(self) -> dict[str, int]:
        """The ids of added tokens, special or not, by their written form."""
        return {t.content: i for i, t in self._plain.get_added_tokens_decoder().items()}

    def written(self, token_id: int) -> str:
        """A token's written form; empty for an unknown id."""
        return self._plain.id_to_token(token_id) or ""

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The ids of ``text``, without BOS; markers become tokens only if ``special``.

        ``special`` is for template text, in which users' text is protected. Raises InvalidRequest
        for half of a surrogate pair.
        """
        _require_characters(text)
        if not special:
            return self._as_text(self._plain, text)
        if OPEN in text:
            return self._encode_pieces(text, self._plain, None)
        ids = _ids(self._with_markers, text)
        if self._has_lookalikes and self._num_markers(ids) > self._num_written(text):
            # a normalizer turned other characters into markers, for example wide brackets
            return self._encode_pieces(text, self._plain, None)
        return ids

    def encode_continuation(
        self, text: str, special: bool = False, after: int | None = None
    ) -> list[int]:
        """The ids of ``text`` in the middle of another text, after the token ``after``.

        The tokenizer's initial space is not added. Without ``after`` the preceding text is ordinary
        text. ``special`` and errors as in `encode`.
        """
        marker = None if after is None else self._separators.get(after)
        if self._same_everywhere(marker):
            return self.encode(text, special)
        _require_characters(text)
        backend = self._plain_middle if marker is None else self._plain_behind
        return self._encode_pieces(text if special else self.protect(text), backend, marker)

    def is_middle(self, before: Sequence[int]) -> bool:
        """Whether text after the tokens ``before`` is tokenized as in the middle of a text."""
        marker = self._separators.get(before[-1]) if before else None
        return self._same_everywhere(marker) or (bool(before) and marker is None)

    def _same_everywhere(self, marker: "AddedToken | None") -> bool:
        strips = marker is not None and marker.rstrip
        return self._source_middle == self._source and not strips

    def _num_markers(self, ids: Sequence[int]) -> int:
        return sum(token_id in self._markers for token_id in ids)

    def _num_written(self, text: str) -> int:
        return sum(marker in self._markers for _, marker in self._cutter.cut(text))

    def protect(self, text: str) -> str:
        """``text`` from a user, safe inside template text for ``encode(..., special=True)``."""
        return self._protector.protect(text)

    def encode_document(self, text: str, after: int | None = None) -> list[int]:
        """The ids of a document in the model's document template, as by `encode_continuation`.

        Markers in ``text`` are characters."""
        return self.encode_continuation(self.document_text(text), special=True, after=after)

    def document_text(self, text: str) -> str:
        """A document in the model's document template, as template text."""
        before, _, after = self.document_template.partition("{text}")
        return before + self.protect(text) + after

    def render_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as template text, for ``encode(..., special=True)``.

        Contents are strings or lists of parts. A part of type ``document`` becomes
        ``DOCUMENT_CUT``. The template receives ``variables`` such as ``tools`` and
        ``enable_thinking``. Raises InvalidRequest and LimitExceeded.
        """
        template = self._chat_template("tool_use" if variables.get("tools") else "default")
        safe = {name: self._protector.protect_tree(value) for name, value in variables.items()}
        messages = protect_messages(messages, self._protector, self._answer_protector)
        named = {**self.named_tokens, "add_generation_prompt": add_generation_prompt}
        # templates test these for none, and undefined variables are not none
        absent = {"tools": None, "documents": None}
        return self._protector.mend(template.render(messages, **{**absent, **named, **safe}))

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[list[int]]:
        """The conversation's ids, cut at its documents: one run more than documents.

        ``variables`` and errors as in `render_chat`."""
        first, *rest = self.cut_chat(messages, **variables)
        runs = [self.encode_continuation(piece, special=True) for piece in rest]
        return [self.encode(first, special=True), *runs]

    def cut_chat(self, messages: Sequence[Message], **variables: Any) -> list[str]:
        """The template texts of the runs of `encode_chat`."""
        return cut_at_documents(self.render_chat(messages, **variables), self._protector)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ``ids``, equal to the joined pieces of `stream`."""
        stream = self.stream(skip_special)
        return "".join([stream.push(token_id) for token_id in ids]) + stream.finish()

    def stream(self, skip_special: bool = True) -> Detokenizer:
        """A new incremental decoder."""
        return Detokenizer(
            self._token_bytes, self.special_token_ids if skip_special else frozenset()
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token."""
        return self._token_bytes[token_id]

    @cached_property
    def _with_markers(self) -> "Backend":
        return self._backend(self._source, markers_are_text=False)

    @cached_property
    def _plain_behind(self) -> "Backend":
        same = self._source_behind == self._source
        return self._plain if same else self._backend(self._source_behind, markers_are_text=True)

    @cached_property
    def _plain_middle(self) -> "Backend":
        same = self._source_middle == self._source_behind
        if same:
            return self._plain_behind
        return self._backend(self._source_middle, markers_are_text=True)

    @property
    def _sources(self) -> tuple[str, str, str]:
        return self._source, self._source_behind, self._source_middle

    def _rewritten(self, described: Mapping[str, Any], changed: Mapping[str, Any]) -> str:
        same = changed is described
        return self._source if same else json.dumps(changed, ensure_ascii=False)

    def _backend(self, source: str, markers_are_text: bool) -> "Backend":
        try:
            backend: Backend = load_backend(source, markers_are_text)
        except CorruptCheckpoint as error:
            raise CorruptCheckpoint(f"{self._path} {error}") from error
        if self._sandbox is None:
            return backend
        number = self._sources.index(source)
        return cast("Backend", GuardedBackend(backend, self._sandbox, number, markers_are_text))

    def _encode_pieces(
        self, text: str, backend: "Backend", before: "AddedToken | None"
    ) -> list[int]:
        """The ids of template text after the marker ``before``, the first piece by ``backend``."""
        ids: list[int] = []
        for piece, marker in self._cutter.cut(text, before):
            if piece:
                ids += self._as_text(backend, piece)
            if marker is not None:
                ids.append(marker)
            backend = self._plain_behind
        return ids

    def _as_text(self, backend: "Backend", text: str) -> list[int]:
        """The ids of ``text`` without markers. Raises InvalidRequest."""
        ids = _ids(backend, text)
        if self._markers.keys().isdisjoint(ids):
            return ids
        # models such as Unigram have markers among their pieces; a cut inside prevents them
        spans = [span for span in _spans(backend, text) if span[0] in self._markers]
        cuts = [start + 1 for _, start, end in spans if end - start > 1]
        if not cuts:
            self._require_spelled(text, spans)
            return ids
        ends = [*cuts[1:], len(text)]
        ids = self._as_text(backend, text[: cuts[0]])
        for start, end in zip(cuts, ends, strict=True):
            ids += self._as_text(self._plain_middle, text[start:end])
        return ids

    def _require_spelled(self, text: str, spans: Sequence[tuple[int, int, int]]) -> None:
        """Raise InvalidRequest for a character that becomes a marker of another spelling."""
        for token_id, start, end in spans:
            if text[start:end] != (marker := self._markers[token_id].content):
                raise InvalidRequest(
                    f"the model's tokenizer reads {text[start:end]!r} as its marker {marker!r}: "
                    "leave that out"
                )

    def _is_written(self, token: str) -> bool:
        in_document = token in self.document_template and not is_ordinary(token)
        templates = self._chat_templates.values()
        return in_document or any(template.constants.writes(token) for template in templates)

    def _is_searched(self, token: str) -> bool:
        templates = self._chat_templates.values()
        return any(template.constants.searches_for(token) for template in templates)

    def _chat_template(self, name: str) -> ChatTemplate:
        if not self._chat_templates:
            raise InvalidRequest(
                "this checkpoint has no chat template; send plain text or use an instruct model"
            )
        return self._chat_templates.get(name) or self._chat_templates["default"]

    def _require_tokens(self, folder: Path) -> None:
        """Raises CorruptCheckpoint for tokens that only tokenizer_config.json has.

        Transformers adds such tokens. Here they would be characters, and an end token without
        effect."""
        needed = [*self._settings.added_tokens, self.named_tokens.get("eos_token")]
        if self._settings.add_bos_token:
            needed.append(self.named_tokens.get("bos_token"))
        lacking = {name: None for name in needed if name and self.token_id(name) is None}
        if lacking:
            raise CorruptCheckpoint(
                f"{folder}: tokenizer_config.json names tokens that tokenizer.json lacks: "
                f"{shortened([*lacking])}; save the tokenizer again with transformers' "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )

    def _derive_bos(self) -> int | None:
        """BOS by ``add_bos_token``, by default the first token of the post-processor."""
        named = self.token_id(self.named_tokens.get("bos_token", ""))
        if self._settings.add_bos_token is not None:
            return named if self._settings.add_bos_token else None
        added = self._plain.encode("", add_special_tokens=True).ids
        first = added[0] if added else None
        return first if first is not None and first in (named, *self.special_token_ids) else None

    def _derive_eos(self) -> frozenset[int]:
        """The tokenizer's end token and the end tokens of the configuration files."""
        ids = self._settings.end_ids()
        named = self.token_id(self.named_tokens.get("eos_token", ""))
        return frozenset(ids if named is None else {*ids, named})


def _ids(backend: "Backend", text: str) -> list[int]:
    return backend.ids(text) if isinstance(backend, GuardedBackend) else ids_of(backend, text)


def _spans(backend: "Backend", text: str) -> list[tuple[int, int, int]]:
    return backend.spans(text) if isinstance(backend, GuardedBackend) else spans_of(backend, text)


def _require_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text has half of a surrogate pair at character {error.start}: decode it with "
            "errors='replace', or leave it out"
        ) from error
