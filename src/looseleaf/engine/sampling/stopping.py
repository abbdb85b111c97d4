"""The end of an output: stop ids, end of sequence, length, and stop strings in the growing text.

There is a checker per output. API processes run it in
`llm.remote.stream`. It withholds text from the stream that may begin a stop string.
"""

from collections.abc import Collection
from typing import Literal, NamedTuple

from looseleaf.sampling_params import SamplingParams


class Finish(NamedTuple):
    """The reason of an output's end, as in OpenAI's API and vLLM.

    ``stop`` is the stop string or stop token id. It is None for an end-of-sequence token and for
    other reasons.
    """

    reason: Literal["stop", "length", "abort"]
    stop: str | int | None = None


class _StopPrefix:
    """The length of a stop string's prefix at the end of a growing text (Knuth-Morris-Pratt)."""

    def __init__(self, stop: str) -> None:
        self.length = 0
        self._stop = stop
        # for each prefix length, the next shorter prefix that is also a suffix
        self._shorter = [0, 0]

    def push(self, text: str) -> None:
        if not self.length and self._stop[0] not in text:
            return
        for character in text:
            # after a whole stop string its longest suffix may begin the next
            if self.length == len(self._stop):
                self.length = self._shorter[self.length]
            self.length = self._after(self.length, character)
            if self.length == len(self._shorter):
                last = self._shorter[-1]
                self._shorter.append(self._after(last, self._stop[self.length - 1]))

    @property
    def partial_length(self) -> int:
        """Length of the longest proper prefix of the stop string that ends the text."""
        whole = self.length == len(self._stop)
        return self._shorter[self.length] if whole else self.length

    def _after(self, length: int, character: str) -> int:
        while length and self._stop[length] != character:
            length = self._shorter[length]
        return length + (self._stop[length] == character)


class StopChecker:
    """Checks an output token by token for its end.

    The text excludes the end token and everything from the stop string on, unless the request
    includes them. The stop string that is complete first ends the output, so the result does not
    depend on token boundaries.
    """

    def __init__(
        self, params: SamplingParams, *, max_tokens: int, eos_token_ids: Collection[int] = ()
    ) -> None:
        """``max_tokens`` is the smaller of the request's limit and the rest of the context."""
        self._max_tokens = max_tokens
        self._min_tokens = params.min_tokens
        self._eos_token_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self._stop_token_ids = frozenset(params.stop_token_ids or ())
        self._stop = tuple(params.stop or ())
        self._include_stop = params.include_stop_str_in_output
        # stop strings that the text includes are not withheld
        self._prefixes = [] if self._include_stop else [_StopPrefix(stop) for stop in self._stop]
        self._text = ""
        self.num_tokens = 0
        self.finish: Finish | None = None

    @property
    def text(self) -> str:
        """All text so far, withheld text included; final once ``finish`` is set."""
        return self._text

    @property
    def ends_with_next(self) -> bool:
        """Whether the output ends after any next token."""
        return self.num_tokens + 1 >= self._max_tokens

    @property
    def visible_text(self) -> str:
        """The text to stream: the text so far without withheld text. It only grows."""
        return self._text[: len(self._text) - (0 if self.finish else self._num_withheld())]

    def push(self, token_id: int, text: str) -> Finish | None:
        """Append a token and its text; returns the reason if the output ends, else None.

        Raises ValueError after the end."""
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
        """Whether ``token_id`` as the next token ends the output without text."""
        may_stop = self.num_tokens + 1 > self._min_tokens
        return may_stop and not self._include_stop and self._token_finish(token_id) is not None

    def end_text(self, text: str) -> None:
        """Append the last ``text`` of an ended output, except after a stop string."""
        if text and self.finish is not None and not isinstance(self.finish.stop, str):
            self.finish = self._extend(text, self.num_tokens > self._min_tokens) or self.finish

    def complete(self) -> Finish:
        """Finish an output that no token can follow; the reason is ``stop``, also at the limit."""
        if self.finish is None or self.finish.reason == "length":
            self.finish = Finish("stop")
        return self.finish

    def close(self, reason: Literal["stop", "length", "abort"] = "abort") -> Finish:
        """End the output and release withheld text; an earlier reason stays."""
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
        for prefix in self._prefixes:
            prefix.push(text)
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

    def _num_withheld(self) -> int:
        return max((prefix.partial_length for prefix in self._prefixes), default=0)
