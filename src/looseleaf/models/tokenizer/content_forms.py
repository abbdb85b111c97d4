"""In which form a chat template reads contents: as strings, or as lists of parts.

Some templates know contents only as ``[{"type": "text", "text": ...}]``, and of a string they write
nothing. A probe tells: contents that are numbers no template has, of which those are looked for in
what the template makes of them.
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
    """The forms of contents that one template reads, by role; a role is probed when it first comes.

    Safe to share between threads."""

    def __init__(self) -> None:
        self._known: Forms = {}

    def render(self, render: Render, messages: Sequence[Message]) -> str:
        """What ``render`` makes of messages, whose contents are strings.

        Raises InvalidRequest if a message's text is in neither form among what it makes, and what
        ``render`` raises."""
        new = any(m["role"] not in self._known for m in messages if _has_text(m))
        read = new and self._probe(render, messages)
        rendered = render(_in_forms(messages, self._known))
        texts = [m for m in messages if _has_text(m)]
        missing = next((m for m in texts if m["content"].strip() not in rendered), None)
        if missing is None or read:
            return rendered
        # the template may have cut or escaped a text that it reads
        if not self._probe(render, messages):
            raise _left_out(missing["role"])
        return render(_in_forms(messages, self._known))

    def _probe(self, render: Render, messages: Sequence[Message]) -> bool:
        """Find the forms of the roles in ``messages``, in this very order of roles.

        False if the template refuses all probes; raises InvalidRequest for a role left out."""
        probes = [
            {**message, "content": str(_PROBE + number)} if _has_text(message) else message
            for number, message in enumerate(messages)
        ]
        left_out = [m["role"] for m in probes if _has_text(m)]
        refused = True
        for forms in _candidates(dict.fromkeys(left_out)):
            try:
                rendered = render(_in_forms(probes, forms))
            except InvalidRequest:
                continue
            unread = {m["role"] for m in probes if _has_text(m) and not _is_read(m, rendered)}
            if not unread:
                self._known = {**self._known, **forms}
                return True
            refused = False
            left_out = [role for role in left_out if role in unread] or [*unread]
        if refused:
            return False
        raise _left_out(left_out[0])


def _candidates(roles: Iterable[str]) -> Iterator[Forms]:
    """Forms to try: one for all, then another for one of the roles."""
    strings: Forms = dict.fromkeys(roles, "string")
    parts: Forms = dict.fromkeys(strings, "parts")
    yield strings
    yield parts
    if len(strings) > 1:
        for role in strings:
            yield {**parts, role: "string"}
            yield {**strings, role: "parts"}


def _left_out(role: str) -> InvalidRequest:
    return InvalidRequest(
        f"this model's chat template leaves {role} messages out, as strings and as lists of "
        "parts: put the text into the users' messages"
        if role != "user"
        else "this model's chat template leaves users' messages out, as strings and as lists of "
        "parts: use another chat template, or complete a raw prompt"
    )


def _is_read(message: Message, rendered: str) -> bool:
    # a list that is written as Python writes it is not read
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
