"""A checkpoint's chat template, rendered in a sandbox that keeps apart what users wrote.

The template writes markers such as ``<|user|>``; a user may type the same characters. Text that
looks like a marker is therefore wrapped before it enters the template (``protect``) and comes out
still wrapped, so that the tokenizer can tell the two. ``DOCUMENT_CUT`` marks where a document
stands.
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
_LIMITS = Limits(seconds=2.0, mib=512, output=1 << 26)
_ROLE = re.compile(r"\w+")
# every template has these, though those that print whatever role there is do not name them
_ROLES = ("system", "user", "assistant")
# further ones that are listed if the template names them
_MORE_ROLES = ("developer", "tool", "function", "ipython", "model")

Message = Mapping[str, Any]


class Protector:
    """Wraps and unwraps text that looks like one of ``markers``."""

    def __init__(self, markers: Iterable[str]) -> None:
        literals = sorted({*markers, OPEN, CLOSE, DOCUMENT_CUT}, key=len, reverse=True)
        alternatives = "|".join(re.escape(literal) for literal in literals)
        self._literal = re.compile(alternatives)
        self.wrapped = re.compile(f"{OPEN}({alternatives}|){CLOSE}", re.DOTALL)
        self._torn = re.compile(f"(?P<whole>{self.wrapped.pattern})|{OPEN}|{CLOSE}", re.DOTALL)
        cuts = [(text, at) for text in literals for at in range(1, len(text))]
        self._beginnings = tuple({text[:at] for text, at in cuts})
        self._endings = tuple({text[at:] for text, at in cuts})

    def protect(self, text: str) -> str:
        """``text`` with every marker in it wrapped; ``unprotect`` gives it back.

        Half of a marker at either end, which a template may put beside the other half, is kept from
        it by a wrapper of nothing, within the spaces that templates take off."""
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
        """``text`` in which a template may have cut wrappers in two, as when it splits at a marker.

        What a user types of a wrapper is wrapped itself, so halves are ours and stand for nothing.
        Each becomes a wrapper of nothing, which keeps what is beside it from making a marker.
        """
        return self._torn.sub(lambda match: match["whole"] or OPEN + CLOSE, text)

    def protect_tree(self, value: Any) -> Any:
        """``value`` with every string in its lists and mappings protected, names as well."""
        if isinstance(value, str):
            return self.protect(value)
        if isinstance(value, Mapping):
            return {self.protect_tree(key): self.protect_tree(value[key]) for key in value}
        if isinstance(value, Sequence):
            return [self.protect_tree(item) for item in value]
        return value


class ChatTemplate:
    """One Jinja template; strings from outside must come protected.

    ``constants`` are the texts that it writes and looks for. A template whose form bounds its work
    is rendered here, any other one in a process under limits."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._rendering = compile_template(source)
        self.constants = TemplateConstants(parse_template(source), (*_ROLES, *_MORE_ROLES))
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
        """The text of the conversation, each content in the form that the template reads.

        Raises InvalidRequest if the template refuses the conversation, does not know a message's
        role, or leaves a message's text out, and LimitExceeded if it takes too much time or memory.
        """
        for message in messages:
            self._require_role(str(message["role"]))
        return self._forms.render(lambda told: self.render_once(told, variables), messages)

    def render_once(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """The text of the conversation as it is. Raises InvalidRequest if the template fails."""
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
        # a template that prints any role would make a turn of a typo, others leave it out
        if role in _ROLES or self._names(role):
            return
        known = [*_ROLES, *filter(self._names, _MORE_ROLES)]
        raise InvalidRequest(
            f"this model's chat template has no role {role!r}: use {', '.join(known)}"
        )

    def _names(self, role: str) -> bool:
        return f"'{role}'" in self.source or f'"{role}"' in self.source


def protect_messages(
    messages: Sequence[Message], protector: Protector, answers: Protector
) -> list[dict[str, Any]]:
    """Messages ready for a template: contents flattened to text, all of users' text protected.

    ``answers`` is for contents of assistants. It lets markers pass that the model writes as text
    and the template looks for, such as those around reasoning."""
    return [
        _protect_message(m, protector, answers if m.get("role") == "assistant" else protector)
        for m in messages
    ]


def _protect_message(
    message: Message, protector: Protector, of_content: Protector
) -> dict[str, Any]:
    role = message.get("role")
    # roles are put between marker characters by some templates, so they can't be wrapped
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidRequest(f"a message's role must be a word such as 'user', not {role!r}")
    # an assistant that calls a tool may say nothing besides
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
    # texts that stand side by side are one, in which a marker may begin in one and end in the next
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
