"""A checkpoint's chat template, which keeps users' text distinct from the template's markers.

A template writes markers such as ``<|user|>``, and users may type the same characters.
``Protector.protect`` wraps such characters before rendering. They are still wrapped after
rendering, so the tokenizer can distinguish them from markers. ``DOCUMENT_CUT`` marks the position
of a document.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from looseleaf.errors import InvalidRequest
from looseleaf.models.tokenizer.content_forms import ContentForms
from looseleaf.models.tokenizer.template_markers import TemplateConstants
from looseleaf.sandbox import Limits, Sandbox
from looseleaf.sandbox.plain_templates import MOST_STEPS, plain_nodes, size_of
from looseleaf.sandbox.templates import compile_template, parse_template, render

OPEN, CLOSE = "\U000f0000", "\U000f0001"
DOCUMENT_CUT = "\U000f0002"
# wrappers in Python's notation of objects, and in JSON of ASCII
_ESCAPES = {
    "\\U000f0000": OPEN,
    "\\U000f0001": CLOSE,
    "\\udb80\\udc00": OPEN,
    "\\udb80\\udc01": CLOSE,
}
# a pair of backslashes is an escaped backslash; users' own escapes are wrapped
_ESCAPED = re.compile(rf"\\\\|(?<!{OPEN})(?:{'|'.join(map(re.escape, _ESCAPES))})")
_LIMITS = Limits(seconds=2.0, mib=512, output=1 << 26)
_ROLE = re.compile(r"\w+")
# accepted although templates that print any role do not name them
_ROLES = ("system", "user", "assistant")
# accepted if the template names them
_OPTIONAL_ROLES = ("developer", "tool", "function", "ipython", "model")

Message = Mapping[str, Any]


class Protector:
    """Wraps and unwraps characters that equal one of ``markers``."""

    def __init__(self, markers: Iterable[str]) -> None:
        literals = sorted({*markers, OPEN, CLOSE, DOCUMENT_CUT}, key=len, reverse=True)
        alternatives = "|".join(re.escape(literal) for literal in [*_ESCAPES, *literals])
        self._literal = re.compile(alternatives)
        self.wrapped = re.compile(f"{OPEN}({alternatives}|){CLOSE}", re.DOTALL)
        self._half = re.compile(f"(?P<whole>{self.wrapped.pattern})|{OPEN}|{CLOSE}", re.DOTALL)
        cuts = [(text, at) for text in literals for at in range(1, len(text))]
        self._beginnings = tuple({text[:at] for text, at in cuts})
        self._endings = tuple({text[at:] for text, at in cuts})

    def protect(self, text: str) -> str:
        """``text`` with every marker wrapped; ``unprotect`` inverts it.

        A template may join a part of a marker at either end with the rest. An empty wrapper
        prevents this. It is inside the spaces that templates strip."""
        wrapped = self._literal.sub(lambda match: OPEN + match[0] + CLOSE, text)
        core = wrapped.rstrip()
        if core.endswith(self._beginnings):
            wrapped = core + OPEN + CLOSE + wrapped[len(core) :]
        core = wrapped.lstrip()
        if core.startswith(self._endings):
            wrapped = wrapped[: len(wrapped) - len(core)] + OPEN + CLOSE + core
        return wrapped

    def unprotect(self, text: str) -> str:
        return self.wrapped.sub(lambda match: match[1], text)

    def mend(self, text: str) -> str:
        """``text`` with escaped wrappers restored, and each half of one replaced by an empty one.

        JSON in ASCII and Python's notation of objects escape wrappers. A template that splits at a
        marker cuts wrappers in two. Wrapper characters in users' text are wrapped, so every half
        is the template's. An empty wrapper separates its neighbours.
        """
        text = _ESCAPED.sub(lambda match: _ESCAPES.get(match[0], match[0]), text)
        return self._half.sub(lambda match: match["whole"] or OPEN + CLOSE, text)

    def protect_tree(self, value: Any) -> Any:
        """``value`` with every string in its lists and mappings protected, keys included."""
        if isinstance(value, str):
            return self.protect(value)
        if isinstance(value, Mapping):
            return {self.protect_tree(key): self.protect_tree(value[key]) for key in value}
        if isinstance(value, Sequence):
            return [self.protect_tree(item) for item in value]
        return value


class ChatTemplate:
    """One Jinja template; its input strings must be protected.

    ``constants`` are the texts that it writes and searches for. A template whose form bounds its
    work renders in this process, any other template in a sandbox."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._rendering = compile_template(source)
        self.constants = TemplateConstants(parse_template(source), (*_ROLES, *_OPTIONAL_ROLES))
        self._forms = ContentForms()
        self._nodes = plain_nodes(source)
        self.sandbox = Sandbox(
            "templates",
            lambda: {"source": source},
            what="template",
            subject="this model's chat template",
            advice="shorten the conversation, or mend the template of the checkpoint",
        )

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """The text of the conversation, with each content in the form that the template reads.

        Raises InvalidRequest if the template rejects the conversation, lacks a message's role or
        omits a message's text. Raises LimitExceeded for too much time or memory.
        """
        for message in messages:
            self._require_role(str(message["role"]))
        return self._forms.render(lambda formed: self.render_once(formed, variables), messages)

    def render_once(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """The text of ``messages``, unchanged. Raises InvalidRequest if the template fails."""
        named = {"messages": messages, **variables}
        if self._is_bounded(named):
            return render(self._rendering, named)
        return str(self.sandbox.call(named, _LIMITS))

    @property
    def is_plain(self) -> bool:
        """Whether the template's form bounds its work."""
        return self._nodes is not None

    def _is_bounded(self, named: Mapping[str, Any]) -> bool:
        if self._nodes is None:
            return False
        number = len(named["messages"]) + 1
        return self._nodes * number * size_of(named) <= MOST_STEPS

    def _require_role(self, role: str) -> None:
        # templates print a misspelled role as a turn, or omit its message
        if role in _ROLES or self._names(role):
            return
        known = [*_ROLES, *filter(self._names, _OPTIONAL_ROLES)]
        raise InvalidRequest(
            f"this model's chat template has no role {role!r}: use {', '.join(known)}"
        )

    def _names(self, role: str) -> bool:
        return f"'{role}'" in self.source or f'"{role}"' in self.source


def protect_messages(
    messages: Sequence[Message], protector: Protector, answers: Protector
) -> list[dict[str, Any]]:
    """Messages for a template: contents flattened to text, and all strings protected.

    ``answers`` protects contents of assistants. It ignores markers that the model writes as text
    and the template searches for, such as the markers around reasoning."""
    return [
        _protect_message(m, protector, answers if m.get("role") == "assistant" else protector)
        for m in messages
    ]


def _protect_message(
    message: Message, protector: Protector, of_content: Protector
) -> dict[str, Any]:
    role = message.get("role")
    # templates write roles between marker characters, so roles can't be wrapped
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidRequest(f"a message's role must be a word such as 'user', not {role!r}")
    # a message with tool calls needs no content
    if message.get("content") is None and not message.get("tool_calls"):
        raise InvalidRequest(
            f"the message of role {role!r} has no content: give it a string, or a list of strings "
            "and documents, as in {'role': 'user', 'content': 'Who?'}"
        )
    safe: dict[str, Any] = {
        key: protector.protect_tree(value) for key, value in message.items() if key != "content"
    }
    return safe | {"role": role, "content": _flatten(message.get("content"), of_content)}


def _flatten(content: Any, protector: Protector) -> str | None:
    if content is None or isinstance(content, str):
        return None if content is None else protector.protect(content)
    if not isinstance(content, list | tuple):
        raise InvalidRequest(
            "a message's content is a string, or a list of strings, documents and parts, not "
            f"{type(content).__name__}"
        )
    # a marker may begin in one text and end in the next, so adjacent texts are joined first
    runs = groupby(map(_text_of, content), key=lambda text: text is None)
    return "".join(
        DOCUMENT_CUT * len([*run]) if cut else protector.protect("".join(filter(None, run)))
        for cut, run in runs
    )


def _text_of(part: Any) -> str | None:
    """The text of a part, None for a document."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise InvalidRequest("a content part of type 'text' needs a string as its 'text'")
        return str(part["text"])
    if kind == "document":
        return None
    raise InvalidRequest(
        f"a content part must be text or a document, not {kind or type(part).__name__!r}"
    )
