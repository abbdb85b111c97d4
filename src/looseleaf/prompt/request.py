"""A caller's input: documents, parts of a prompt, policies, the request, and checks of keywords."""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cached_property
from numbers import Real
from typing import Any, Literal, TypedDict, TypeVar, cast

import numpy as np
import numpy.typing as npt

from looseleaf.config import Fuse, FuseSelector, Revise, Select, SelectPolicy
from looseleaf.config.option import require_text
from looseleaf.errors import EmptyDocument, InvalidOption, InvalidRequest
from looseleaf.kv.keys import KeySpace, SegmentKey
from looseleaf.sampling_params import SamplingParams

DocumentContext = Literal["lead", "alone", "prompt"]
Kind = TypeVar("Kind", Fuse, Select, Revise)
# cached keys of a document, one per salt and lead
_MAX_KEYS = 16
_SHORT = {Fuse: "selector", Select: "policy", Revise: "window"}


@dataclass(frozen=True)
class Document:
    """Text whose keys and values are computed once and read at any position.

    ``context`` is the text that the document sees when it is computed:

    - ``lead``: the text before the first document, such as a system prompt and a chat header.
    - ``alone``: only the beginning-of-sequence token of models that have one.
    - ``prompt``: the whole prompt before it, as text does. This is exact, but reuse needs the same
      beginning of the prompt.

    The same text in the same context is the same segment. ``name`` appears in reports and is not
    part of the text. Several texts are a *collection*, which is one segment. Each text of it has
    its own document template and sees the texts before it. ``token_ids`` are the known ids of the
    text in the template, which avoids tokenization. ``tag`` is the text's name for the routers of a
    fleet, and no part of its identity. Raises InvalidOption for other types than text,
    EmptyDocument for a blank text and an empty collection."""

    text: str | Sequence[str]
    name: str | None = None
    context: DocumentContext = "lead"
    token_ids: tuple[int, ...] | None = field(default=None, repr=False)
    tag: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            # a copy, since callers may change their list
            object.__setattr__(self, "text", _checked_texts(self.text))
        blank = next((n for n, text in enumerate(self.texts, 1) if not text.strip()), None)
        if blank is not None or not self.texts:
            number = f"text {blank} of " if len(self.texts) > 1 else ""
            name = f" {self.name!r}" if self.name else ""
            raise EmptyDocument(
                f"{number}document{name} is empty: leave it out, or check the file it came from"
            )
        if self.context not in ("lead", "alone", "prompt"):
            raise InvalidOption(
                f"a document's context is 'lead', 'alone' or 'prompt', not {self.context!r}"
            )

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of a collection, or the single text of another document."""
        return (self.text,) if isinstance(self.text, str) else tuple(self.text)


def _checked_texts(texts: object) -> tuple[str, ...]:
    members = tuple(texts) if isinstance(texts, list | tuple) else (texts,)
    malformed = [text for text in members if not isinstance(text, str)]
    if malformed:
        raise InvalidOption(
            "a document's text must be a string, or a list of strings for a collection, but holds "
            f"{type(malformed[0]).__name__}"
        )
    return members


Part = str | Document | Sequence[int]
"""Text, a document, or token ids of text."""

Prompt = str | Sequence[Part]
"""A text, or a list of parts in reading order."""

Message = Mapping[str, Any]
"""A chat message with ``role`` and ``content``.

``content`` is a string, or a list of strings, documents and OpenAI's text parts."""


@dataclass(frozen=True)
class TextPart:
    """Tokens of text, which see everything before them.

    The first ``num_shared`` tokens of a prompt's first part are the service's, so all salts share
    their pages. If the last part ``opens_answer``, the output is a new text. Otherwise it continues
    the prompt's text."""

    tokens: tuple[int, ...]
    num_shared: int = 0
    opens_answer: bool = field(default=False, compare=False)


class DocumentContent:
    """A document's token array and keys, cached for all prompts with this document."""

    def __init__(self) -> None:
        self._ids: npt.NDArray[np.int32] | None = None
        self._keys: dict[tuple[SegmentKey, SegmentKey], SegmentKey] = {}

    def ids(self, tokens: tuple[int, ...]) -> npt.NDArray[np.int32]:
        """``tokens`` as an int32 array; every call must pass the same tokens."""
        if self._ids is None:
            self._ids = np.frombuffer(struct.pack(f"<{len(tokens)}i", *tokens), dtype="<i4")
        return self._ids

    def key(self, tokens: tuple[int, ...], keys: KeySpace, context: SegmentKey) -> SegmentKey:
        """The segment key of ``tokens`` in ``context``; the latest keys are cached."""
        entry = keys.root, context
        if entry not in self._keys:
            while len(self._keys) >= _MAX_KEYS:
                self._keys.pop(next(iter(self._keys)))
            self._keys[entry] = keys.document(context, self.ids(tokens))
        return self._keys[entry]


@dataclass(frozen=True)
class DocumentPart:
    """Tokens of a document, whose context is the first ``context_length`` tokens of the prompt.

    The ``primer`` is read between that context and the document when the document is computed. It
    is no part of the prompt (`looseleaf.prompt.primer`).
    ``tag`` is the document's name for the routers of a fleet, empty for none. ``discovered`` marks
    a piece of text that no client marked (`looseleaf.prompt.discover`)."""

    tokens: tuple[int, ...]
    context_length: int
    name: str
    content: DocumentContent = field(default_factory=DocumentContent, repr=False, compare=False)
    tag: str = field(default="", repr=False, compare=False)
    discovered: bool = field(default=False, compare=False)
    primer: "DocumentPart | None" = field(default=None, repr=False, compare=False)

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """``tokens`` as an array."""
        return self.content.ids(self.tokens)

    def key_behind(self, keys: KeySpace, context: SegmentKey) -> SegmentKey:
        """The document's segment key in ``context``."""
        return self.content.key(self.tokens, keys, context)


PromptParts = tuple[TextPart | DocumentPart, ...]
"""A tokenized prompt. Text parts are not adjacent, and the last part is text."""


def tokenized(prompt: object) -> PromptParts | None:
    """``prompt`` if it is tokenized, else None."""
    if not isinstance(prompt, tuple) or not prompt:
        return None
    return prompt if all(isinstance(part, TextPart | DocumentPart) for part in prompt) else None


@dataclass(frozen=True)
class SystemPrompt:
    """A service's system text, and the tokens of a chat with it up to the first user's text."""

    text: str
    tokens: tuple[int, ...] = field(repr=False)


class Policies(TypedDict, total=False):
    """Policies of a request, by name; each is off by default.

    ``fuse`` selects tokens of reused documents to recompute. ``select`` selects the keys that
    decoding reads. ``revise`` lets earlier rows read the keys of the newest row."""

    fuse: Fuse | None
    select: Select | None
    revise: Revise | None


class PolicyOptions(TypedDict, total=False):
    """`Policies` in a caller's notation, where a selector, policy or window alone suffices."""

    fuse: Fuse | FuseSelector | None
    select: Select | SelectPolicy | None
    revise: Revise | int | None


@dataclass(frozen=True)
class Request:
    """A tokenized prompt with sampling parameters and policies, under a caller's id.

    Requests with different ``salt`` share no keys and values. ``deadline`` limits the seconds from
    arrival to the last token; a late request ends with DeadlineExceeded. A request that ``warms``
    stores its prompt and has no output. ``fuse`` selects document tokens to recompute, by default
    none. ``select`` selects the keys that decoding reads, by default all. ``revise`` is the number
    of earlier rows that read with the newest row, by default none. A ``canary`` checks the answer
    of another request. The engine ``decodes`` the output, and ends it at stop strings, unless the
    caller does so. The last ``num_given`` tokens of the prompt are a given answer, which ``fuse``
    does not see when it selects tokens. Raises InvalidOption for options that exclude each other.
    """

    request_id: str
    parts: PromptParts
    params: SamplingParams
    salt: str = ""
    deadline: float | None = None
    warms: bool = False
    fuse: Fuse | None = None
    select: Select | None = None
    revise: Revise | None = None
    canary: bool = False
    decodes: bool = True
    num_given: int = 0

    def __post_init__(self) -> None:
        require_sampling(self.params)
        require_text("salt", self.salt)
        if self.deadline is not None and not (
            isinstance(self.deadline, Real) and 0.0 < self.deadline < math.inf
        ):
            raise InvalidOption(
                f"deadline must be a positive number of seconds, not {self.deadline!r}",
                "deadline",
            )
        if self.revise is not None and (self.select is None or self.select.policy == "all"):
            raise InvalidOption(
                "revise lets earlier rows read what the newest one selects, but this request reads "
                "everything: give select with a policy, or leave revise out",
                "revise",
                "select",
            )
        windowed = self.select is not None and self.select.policy == "window"
        if self.revise is not None and self.revise.window > 1 and windowed:
            raise InvalidOption(
                "revise lets earlier rows read the pages that a newer one chose, but policy "
                "'window' chooses none, only positions: give select with a policy that ranks "
                "keys (quest, representatives, partial, retrieval), or leave revise out",
                "revise",
                "select",
            )

        anchored = self.select is not None and self.select.anchors is not None
        if self.revise is not None and self.revise.window > 1 and anchored:
            raise InvalidOption(
                "revise records the pages that each layer has read, so layers can't share a "
                "choice: leave out revise or the anchors of select",
                "revise",
                "select",
            )

    @property
    def opens_answer(self) -> bool:
        """Whether the output is a new text, as in a chat, not a continuation of the prompt."""
        last = self.parts[-1]
        return isinstance(last, TextPart) and last.opens_answer

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, documents included."""
        return sum(len(part.tokens) for part in self.parts)

    @cached_property
    def token_ids(self) -> list[int]:
        """The tokens of the prompt, documents included."""
        ids: list[int] = []
        for part in self.parts:
            ids += part.tokens
        return ids


def with_policies(
    request: Request,
    *,
    fuse: Fuse | FuseSelector | None = None,
    select: Select | SelectPolicy | None = None,
    revise: Revise | int | None = None,
) -> Request:
    """``request`` with policies in the notation of `PolicyOptions`.

    Raises InvalidOption for other types."""
    return replace(
        request,
        fuse=_policy("fuse", Fuse, str, fuse),
        select=_policy("select", Select, str, select),
        revise=_policy("revise", Revise, int, revise),
    )


def _policy(name: str, kind: type[Kind], short: type, value: Any) -> Kind | None:
    if value is None or isinstance(value, kind):
        return value
    if isinstance(value, short):
        return kind(cast(Any, value))
    raise InvalidOption(
        f"{name} is a looseleaf.{kind.__name__}, or the {_SHORT[kind]} that it begins with, not "
        f"{type(value).__name__}"
    )


Method = Literal["generate", "chat", "stream"]

_POLICIES = ("fuse", "select", "revise")
_METHOD_OPTIONS: dict[Method, tuple[str, ...]] = {
    "generate": ("salt", "deadline"),
    "chat": ("salt", "deadline", "system_prompt"),
    "stream": ("salt", "deadline", "on_prefill"),
}
_SAMPLING = tuple(field.name for field in fields(SamplingParams))


def require_policies(method: Method, options: Mapping[str, object]) -> None:
    """Raises InvalidOption for a keyword that ``method`` does not have."""
    for name, value in options.items():
        if name not in _POLICIES:
            raise InvalidOption(f"{method} has no option {name!r}: {_advice(method, name, value)}")


def _advice(method: Method, name: str, value: object) -> str:
    known = (*_POLICIES, *_METHOD_OPTIONS[method])
    if name in _SAMPLING:
        return (
            "options of sampling go into SamplingParams, as in "
            f"llm.{method}(..., SamplingParams({name}={value!r}))"
        )
    if name == "stream":
        return "llm.stream gives the answer of one prompt as it grows, and so does AsyncLLM"
    matches = get_close_matches(name, (*known, *_SAMPLING), 1)
    if matches and matches[0] in _SAMPLING:
        guess = f"if {matches[0]} is meant, that goes into SamplingParams; "
    else:
        guess = f"did you mean {matches[0]}? " if matches else ""
    return (
        f"{guess}its options are {', '.join(known)}; options of sampling go into SamplingParams, "
        "as in SamplingParams(temperature=0)"
    )


def require_sampling(params: object) -> None:
    """Raises InvalidOption unless ``params`` is a SamplingParams."""
    if isinstance(params, Mapping):
        inner = ", ".join(f"{name}={value!r}" for name, value in params.items())
        raise InvalidOption(
            f"sampling parameters are a SamplingParams, not a dict: write SamplingParams({inner})"
        )
    if not isinstance(params, SamplingParams):
        raise InvalidOption(
            f"sampling parameters are a SamplingParams, not {type(params).__name__}: write them as "
            "in SamplingParams(temperature=0, max_tokens=64)"
        )


def sampling_per_prompt(params: object, num_prompts: int) -> list[SamplingParams]:
    """The sampling parameters of each prompt, from a list, a shared value or None for defaults.

    Raises InvalidOption for other types, InvalidRequest for a list of another length."""
    if params is None:
        return [SamplingParams()] * num_prompts
    if not isinstance(params, Sequence) or isinstance(params, str):
        require_sampling(params)
    per_prompt = [params] * num_prompts if isinstance(params, SamplingParams) else list(params)  # type: ignore[call-overload]
    for prompt_params in per_prompt:
        require_sampling(prompt_params)
    if len(per_prompt) != num_prompts:
        raise InvalidRequest(
            f"{num_prompts} prompts but {len(per_prompt)} sampling parameters: give one or as many"
        )
    return per_prompt
