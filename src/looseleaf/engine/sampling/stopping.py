"""Where an output ends: stop ids, end of sequence, length, and stop strings in the growing text.

Pure Python, one checker per output. It also decides what may be streamed: text that could still
turn out to be the beginning of a stop string is held back until that is known.
"""

from collections.abc import Collection
from typing import Literal, NamedTuple

from looseleaf.sampling_params import SamplingParams


class Finish(NamedTuple):
    """Why an output ended, in the OpenAI and vLLM words.

    ``stop`` is the stop string or the stop token id that was met; None after an end-of-sequence
    token and for every other reason.
    """

    reason: Literal["stop", "length", "abort"]
    stop: str | int | None = None


class _Beginning:
    """How much of a stop string a growing text ends with, by the way of Knuth, Morris and Pratt: a
    character costs the same however long the string is."""

    def __init__(self, stop: str) -> None:
        self.length = 0
        self._stop = stop
        # for each length reached so far, the next shorter one that the text then ends with
        self._shorter = [0, 0]

    def push(self, text: str) -> None:
        """Go on with more text."""
        if not self.length and self._stop[0] not in text:
            return
        for character in text:
            # a whole stop string begins the next one with what is left of it
            if self.length == len(self._stop):
                self.length = self._shorter[self.length]
            self.length = self._after(self.length, character)
            if self.length == len(self._shorter):
                last = self._shorter[-1]
                self._shorter.append(self._after(last, self._stop[self.length - 1]))

    @property
    def held(self) -> int:
        """Length of the longest part of the stop string, not all of it, that the text ends with."""
        whole = self.length == len(self._stop)
        return self._shorter[self.length] if whole else self.length

    def _after(self, length: int, character: str) -> int:
        while length and self._stop[length] != character:
            length = self._shorter[length]
        return length + (self._stop[length] == character)


class StopChecker:
    """Follows one output token by token and says when it ends.

    A token that ends the output gives no text, and a stop string is cut off with what follows it,
    unless the request includes them. Of several stop strings the one that is complete first counts,
    so the outcome does not depend on how the text is split into tokens.
    """

    def __init__(
        self, params: SamplingParams, *, max_tokens: int, eos_token_ids: Collection[int] = ()
    ) -> None:
        """``max_tokens`` is the limit that holds: the request's or what the context leaves."""
        self._max_tokens = max_tokens
        self._min_tokens = params.min_tokens
        self._eos_token_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self._stop_token_ids = frozenset(params.stop_token_ids or ())
        self._stop = tuple(params.stop or ())
        self._include_stop = params.include_stop_str_in_output
        # what is included is not held back
        self._beginnings = [] if self._include_stop else [_Beginning(one) for one in self._stop]
        self._text = ""
        self.num_tokens = 0
        self.finish: Finish | None = None

    @property
    def text(self) -> str:
        """All text so far, what is held back included; the final text once ``finish`` is set."""
        return self._text

    @property
    def ends_with_next(self) -> bool:
        """Whether the next token is the last one, whichever it is."""
        return self.num_tokens + 1 >= self._max_tokens

    @property
    def visible_text(self) -> str:
        """What may be streamed: the text so far without what is held back. It only ever grows."""
        return self._text[: len(self._text) - (0 if self.finish else self._num_held())]

    def push(self, token_id: int, text: str) -> Finish | None:
        """Take the next token and the text it adds; returns why the output ends here, or None."""
        if self.finish is not None:
            raise ValueError("the output has ended: start a new StopChecker for another one")
        self.num_tokens += 1
        may_stop = self.num_tokens > self._min_tokens
        at_token = self._token_finish(token_id) if may_stop else None
        if at_token is None or self._include_stop:
            self.finish = self._extend(text, may_stop)
        self.finish = self.finish or at_token
        if self.finish is None and self.num_tokens >= self._max_tokens:
            self.finish = Finish("length")
        return self.finish

    def drops(self, token_id: int) -> bool:
        """Whether the output ends with ``token_id`` as its next token, and without its text."""
        may_stop = self.num_tokens + 1 > self._min_tokens
        return may_stop and not self._include_stop and self._token_finish(token_id) is not None

    def end_text(self, text: str) -> None:
        """The last ``text`` of an output that has ended; none follows a stop string."""
        if text and self.finish is not None and not isinstance(self.finish.stop, str):
            self.finish = self._extend(text, self.num_tokens > self._min_tokens) or self.finish

    def complete(self) -> Finish:
        """The output is whole and nothing can follow: a stop, even at the limit of its length."""
        if self.finish is None or self.finish.reason == "length":
            self.finish = Finish("stop")
        return self.finish

    def close(self, reason: Literal["stop", "length", "abort"] = "abort") -> Finish:
        """End the output from outside and release what is held back; an earlier end stays."""
        self.finish = self.finish or Finish(reason)
        return self.finish

    def _token_finish(self, token_id: int) -> Finish | None:
        if token_id in self._eos_token_ids:
            return Finish("stop")
        if token_id in self._stop_token_ids:
            return Finish("stop", token_id)
        return None

    def _extend(self, text: str, may_stop: bool) -> Finish | None:
        """Append ``text`` and cut at the first stop string that ends in it."""
        num_before = len(self._text)
        self._text += text
        for beginning in self._beginnings:
            beginning.push(text)
        if not (may_stop and self._stop):
            return None
        ends = []
        for stop in self._stop:
            start = self._text.find(stop, max(0, num_before - len(stop) + 1))
            if start >= 0:
                ends.append((start + len(stop), start, stop))
        if not ends:
            return None
        end, start, stop = min(ends)
        self._text = self._text[: end if self._include_stop else start]
        return Finish("stop", stop)

    def _num_held(self) -> int:
        """Length of the longest suffix of the text that begins a stop string."""
        return max((beginning.held for beginning in self._beginnings), default=0)
