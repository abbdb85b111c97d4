"""The form in which a chat template reads contents: strings, or lists of parts.

Templates that read only ``[{"type": "text", "text": ...}]`` write nothing for a string. A probe
detects this: it renders contents that are unusual numbers and searches the text for them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from looseleaf.errors import InvalidRequest

Message = Mapping[str, Any]
Form = Literal["string", "parts"]
Forms = dict[str, Form]
Render = Callable[[Sequence[Message]], str]

_PROBE = 90_210_417_000_000


class ContentForms:
    """The forms of contents that one template reads, by role; the first use of a role probes it.

    Safe to share between threads."""

    def __init__(self) -> None:
        self._known: Forms = {}

    def render(self, render: Render, messages: Sequence[Message]) -> str:
        """The text that ``render`` writes for ``messages``, whose contents are strings.

        Raises InvalidRequest if the text lacks a message in both forms, and the errors of
        ``render``."""
        new = any(m["role"] not in self._known for m in messages if _has_text(m))
        probed = new and self._probe(render, messages)
        rendered = render(_in_forms(messages, self._known))
        texts = [m for m in messages if _has_text(m)]
        missing = next((m for m in texts if m["content"].strip() not in rendered), None)
        if missing is None or probed:
            return rendered
        # the template may shorten or escape a text that it reads
        if not self._probe(render, messages):
            raise _omission(missing["role"])
        return render(_in_forms(messages, self._known))

    def _probe(self, render: Render, messages: Sequence[Message]) -> bool:
        """Detect the forms of the roles in ``messages``, in their order.

        Returns False if the template rejects all probes. Raises InvalidRequest for an omitted role.
        """
        probes = [
            {**message, "content": str(_PROBE + number)} if _has_text(message) else message
            for number, message in enumerate(messages)
        ]
        omitted = [m["role"] for m in probes if _has_text(m)]
        all_rejected = True
        for forms in _candidates(dict.fromkeys(omitted)):
            try:
                rendered = render(_in_forms(probes, forms))
            except InvalidRequest:
                continue
            unread = {m["role"] for m in probes if _has_text(m) and not _is_read(m, rendered)}
            if not unread:
                self._known = {**self._known, **forms}
                return True
            all_rejected = False
            omitted = [role for role in omitted if role in unread] or [*unread]
        if all_rejected:
            return False
        raise _omission(omitted[0])


def _candidates(roles: Iterable[str]) -> Iterator[Forms]:
    """Forms to try: first one form for all roles, then an exception for each role."""
    strings: Forms = dict.fromkeys(roles, "string")
    parts: Forms = dict.fromkeys(strings, "parts")
    yield strings
    yield parts
    if len(strings) > 1:
        for role in strings:
            yield {**parts, role: "string"}
            yield {**strings, role: "parts"}


def _omission(role: str) -> InvalidRequest:
    return InvalidRequest(
        f"this model's chat template leaves {role} messages out, as strings and as lists of "
        "parts: put the text into the users' messages"
        if role != "user"
        else "this model's chat template leaves users' messages out, as strings and as lists of "
        "parts: use another chat template, or complete a raw prompt"
    )


def _is_read(message: Message, rendered: str) -> bool:
    # a template that prints the repr of a list does not read its parts
    text = message["content"]
    return text in rendered and f"'text': '{text}'" not in rendered


def _in_forms(messages: Sequence[Message], forms: Forms) -> list[Message]:
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if message["content"] is not None and forms.get(message["role"]) == "parts"
        else message
        for message in messages
    ]


def _has_text(message: Message) -> bool:
    return bool(message["content"] and message["content"].strip())
