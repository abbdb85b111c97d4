"""What a caller hands in: documents, the parts of a prompt, and the request made of them."""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import Any, Literal, TypedDict, TypeVar, cast

import numpy as np
import numpy.typing as npt

from looseleaf.config import Fuse, FuseSelector, Revise, Select, SelectPolicy
from looseleaf.config.option import require_text
from looseleaf.errors import EmptyDocument, InvalidOption
from looseleaf.kv.keys import KeySpace, SegmentKey
from looseleaf.prompt.options import require_sampling
from looseleaf.sampling_params import SamplingParams

DocumentContext = Literal["lead", "alone", "prompt"]
Kind = TypeVar("Kind", Fuse, Select, Revise)
# places in which a document's key is kept: under how many salts, behind how many leads
_MOST_KEYS = 16
_SHORT = {Fuse: "selector", Select: "policy", Revise: "window"}


@dataclass(frozen=True)
class Document:
    """Text whose keys and values are computed once and read wherever it stands.

    ``context`` says what it sees when it is computed: ``lead``, everything before the first
    document of the request (a system prompt, the chat header); ``alone``, nothing but the
    beginning-of-sequence token of models that have one; or ``prompt``, all that stands before it,
    as if it were text: exact, but reused only where the whole prompt begins the same. ``name``
    shows up in reports and is no part of the text. The same text in the same context is the same
    segment. Several texts are one document, a *collection*: one segment, in which each text has the
    model's document template for itself and sees those before it, so its tokens are those that the
    texts have one after another in a prompt. ``token_ids`` are those of the text in the template,
    if they are known already, so that it is not tokenized again. Raises InvalidOption for what is
    no text, EmptyDocument for a text that is blank or a collection of none."""

    text: str | Sequence[str]
    name: str | None = None
    context: DocumentContext = "lead"
    token_ids: tuple[int, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            # a list is kept as it was when it came
            object.__setattr__(self, "text", _checked_texts(self.text))
        blank = next((n for n, text in enumerate(self.texts, 1) if not text.strip()), None)
        if blank is not None or not self.texts:
            of = f"text {blank} of " if len(self.texts) > 1 else ""
            which = f" {self.name!r}" if self.name else ""
            raise EmptyDocument(
                f"{of}document{which} is empty: leave it out, or check the file it came from"
            )
        if self.context not in ("lead", "alone", "prompt"):
            raise InvalidOption(
                f"a document's context is 'lead', 'alone' or 'prompt', not {self.context!r}"
            )

    @property
    def texts(self) -> tuple[str, ...]:
        """Those of a collection; of any other document its one text."""
        return (self.text,) if isinstance(self.text, str) else tuple(self.text)


def _checked_texts(texts: object) -> tuple[str, ...]:
    several = tuple(texts) if isinstance(texts, list | tuple) else (texts,)
    wrong = [text for text in several if not isinstance(text, str)]
    if wrong:
        raise InvalidOption(
            "a document's text must be a string, or a list of strings for a collection, but holds "
            f"{type(wrong[0]).__name__}"
        )
    return several


Part = str | Document | Sequence[int]
"""Text, a document, or token ids of text."""

Prompt = str | Sequence[Part]
"""A text, or a list of parts in the order in which the model reads them."""

Message = Mapping[str, Any]
"""A chat message: ``role``, and ``content`` that is a string, or a list of strings, documents and
OpenAI's ``{"type": "text", "text": ...}`` parts.
"""


@dataclass(frozen=True)
class TextPart:
    """Tokens of text; they see all that stands before them.

    The first ``num_shared`` of a prompt's first part are the service's own, not the caller's: their
    pages are the same under every salt. Behind a prompt's last part that ``opens_answer`` the
    output is a text of its own; else it continues the prompt's."""

    tokens: tuple[int, ...]
    num_shared: int = 0
    opens_answer: bool = field(default=False, compare=False)


class DocumentContent:
    """What is made of a document's tokens once, for all parts of prompts that are this document:
    an array of them, and keys."""

    def __init__(self) -> None:
        self._ids: npt.NDArray[np.int32] | None = None
        self._keys: dict[tuple[SegmentKey, SegmentKey], SegmentKey] = {}

    def ids(self, tokens: tuple[int, ...]) -> npt.NDArray[np.int32]:
        """``tokens``, which are always the same, as an array."""
        if self._ids is None:
            self._ids = np.frombuffer(struct.pack(f"<{len(tokens)}i", *tokens), dtype="<i4")
        return self._ids

    def key(self, tokens: tuple[int, ...], keys: KeySpace, context: SegmentKey) -> SegmentKey:
        """The key of ``tokens`` behind ``context``; the last few are kept."""
        place = keys.root, context
        if place not in self._keys:
            while len(self._keys) >= _MOST_KEYS:
                self._keys.pop(next(iter(self._keys)))
            self._keys[place] = keys.document(context, self.ids(tokens))
        return self._keys[place]


@dataclass(frozen=True)
class DocumentPart:
    """Tokens of a document, encoded behind the first ``context_length`` tokens of the prompt."""

    tokens: tuple[int, ...]
    context_length: int
    name: str
    content: DocumentContent = field(default_factory=DocumentContent, repr=False, compare=False)

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """``tokens`` as an array."""
        return self.content.ids(self.tokens)

    def key_behind(self, keys: KeySpace, context: SegmentKey) -> SegmentKey:
        """Its key behind ``context``."""
        return self.content.key(self.tokens, keys, context)


PromptParts = tuple[TextPart | DocumentPart, ...]
"""A tokenized prompt: no two text parts are neighbours, and the last part is text."""


def tokenized(prompt: object) -> PromptParts | None:
    """``prompt`` if it is made of tokens already; None if it is what a caller writes."""
    made = isinstance(prompt, tuple) and len(prompt) > 0
    if made and all(isinstance(part, TextPart | DocumentPart) for part in cast(Any, prompt)):
        return cast(PromptParts, prompt)
    return None


@dataclass(frozen=True)
class SystemPrompt:
    """What a service says before every conversation: its text, and the tokens of a chat that begins
    with it, up to where the first user speaks."""

    text: str
    tokens: tuple[int, ...] = field(repr=False)


class Policies(TypedDict, total=False):
    """How a request is computed, by name; what is left out changes nothing.

    ``fuse`` says which tokens of reused documents are computed again, ``select`` which keys
    decoding reads, ``revise`` which of its earlier rows profit from that."""

    fuse: Fuse | None
    select: Select | None
    revise: Revise | None


class GivenPolicies(TypedDict, total=False):
    """`Policies` as a caller may give them: each by the first of its fields alone, a selector, a
    policy, a window."""

    fuse: Fuse | FuseSelector | None
    select: Select | SelectPolicy | None
    revise: Revise | int | None


@dataclass(frozen=True)
class Request:
    """A tokenized prompt with its sampling parameters, under a caller's id.

    Requests with different ``salt`` share no keys and values, whatever their prompts. ``deadline``
    is the most seconds it may take from its arrival to its last token; after that it ends with
    DeadlineExceeded. ``warms`` requests end as soon as their prompt is stored, and have no output.
    ``fuse`` says which tokens of its documents are computed again; None is plain reuse. ``select``
    says which keys its decoding rows read; None is all. ``revise`` says how many earlier rows go on
    to read with the newest; None is none. A ``canary`` checks another one's answer. Raises
    InvalidOption for what has no meaning together.
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
                "'window' chooses none, by their place alone: give select with a policy that looks "
                "at keys (quest, representatives, partial, retrieval), or leave revise out",
                "revise",
                "select",
            )

    @property
    def opens_answer(self) -> bool:
        """Whether the output is a text of its own, as in a chat, or continues the prompt's."""
        last = self.parts[-1]
        return isinstance(last, TextPart) and last.opens_answer

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, documents included."""
        return sum(len(part.tokens) for part in self.parts)

    @cached_property
    def token_ids(self) -> list[int]:
        """The prompt as one list, documents included; made once, for every output names it."""
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
    """``request`` under policies, as `GivenPolicies` has them. Raises InvalidOption for others."""
    return replace(
        request,
        fuse=_policy("fuse", Fuse, str, fuse),
        select=_policy("select", Select, str, select),
        revise=_policy("revise", Revise, int, revise),
    )


def _policy(name: str, kind: type[Kind], short: type, given: Any) -> Kind | None:
    if given is None or isinstance(given, kind):
        return given
    if isinstance(given, short):
        return kind(cast(Any, given))
    raise InvalidOption(
        f"{name} is a looseleaf.{kind.__name__}, or the {_SHORT[kind]} that it begins with, not "
        f"{type(given).__name__}"
    )
