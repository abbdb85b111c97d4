"""Outputs that follow a grammar only from a trigger on, such as the tag that opens a tool call.

Before the trigger and after the block any token may follow, and no mask is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor

from looseleaf.engine.sampling.grammar_state import CompiledGrammar, GrammarState

_BLANKS = b" \t\r\n"


@dataclass(eq=False)
class TriggeredGrammar:
    """A compiled ``block`` that begins after ``trigger``, or with the added ``token``.

    ``words`` has the bytes of all tokens."""

    block: CompiledGrammar
    words: Sequence[bytes]
    trigger: bytes
    token: int | None = None
    anchored: bool = False

    @property
    def is_spent(self) -> bool:
        """Whether an output has exceeded a limit."""
        return self.block.is_spent

    def start(self) -> "TriggeredState":
        """The state at the beginning of an output."""
        return TriggeredState(self)


class TriggeredState:
    """The position of an output: in free text, or in a block."""

    complete = False
    """The text never has to end."""

    def __init__(self, grammar: TriggeredGrammar) -> None:
        self._grammar = grammar
        self._block: GrammarState | None = None
        self._recent: list[int] = []
        self._at_boundary = True

    @property
    def accepting(self) -> bool:
        """Whether the text may end."""
        return self._block is None or self._block.accepting

    def allowed(self) -> Bool[Tensor, "vocab"] | None:
        """The mask of the tokens that may follow; None for all."""
        return None if self._block is None else self._block.allowed()

    def push(self, token_id: int) -> None:
        """Append a token. Raises InvalidRequest if the block does not allow it."""
        if self._block is not None:
            self._block.push(token_id)
            if self._block.complete:
                self._block, self._recent, self._at_boundary = None, [], True
            return
        grammar = self._grammar
        if grammar.token is not None:
            if token_id == grammar.token and (self._at_boundary or not grammar.anchored):
                self._block = grammar.block.start()
            self._at_boundary = self._keeps_boundary(self._word(token_id))
            return
        word = self._word(token_id)
        if not word or (grammar.anchored and not self._recent and self._keeps_boundary(word)):
            # a trigger has no byte of this token
            return
        self._recent.append(token_id)
        first = self._first_of_trigger()
        if first is not None:
            block = grammar.block.start()
            # a text after the trigger that no block has is free
            self._block = block if block.begin(self._recent[first:]) else None
            self._recent, self._at_boundary = [], False
        else:
            self._forget()

    def _keeps_boundary(self, word: bytes) -> bool:
        """Whether an anchored trigger counts after ``word``, by its blanks."""
        return self._at_boundary and not word.strip(_BLANKS)

    def _first_of_trigger(self) -> int | None:
        """The index in the recent tokens of the token in which a complete trigger begins."""
        words = [self._word(token) for token in self._recent]
        text, trigger = b"".join(words), self._grammar.trigger
        if self._grammar.anchored:
            blanks = len(text) - len(text.lstrip(_BLANKS))
            at = blanks if self._at_boundary and text.startswith(trigger, blanks) else -1
        else:
            at = text.find(trigger)
        if at < 0:
            return None
        end = 0
        for number, word in enumerate(words):
            end += len(word)
            if end > at:
                return number
        return None

    def _forget(self) -> None:
        """Drop tokens that can't belong to a trigger."""
        length = sum(len(self._word(token)) for token in self._recent)
        if self._grammar.anchored:
            text = b"".join(map(self._word, self._recent)).lstrip(_BLANKS)
            if not self._at_boundary or not self._grammar.trigger.startswith(text):
                self._recent, self._at_boundary = [], False
            return
        while self._recent:
            length -= len(self._word(self._recent[0]))
            if length < len(self._grammar.trigger) - 1:
                break
            self._recent.pop(0)

    def _word(self, token_id: int) -> bytes:
        words = self._grammar.words
        return words[token_id] if token_id < len(words) else b""
