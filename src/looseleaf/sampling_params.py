"""How a request's tokens are chosen and where its output ends, in vLLM's names and meanings."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from numbers import Integral, Real
from typing import Any, Literal, get_args

from looseleaf.errors import InvalidOption

GREEDY_BELOW = 1e-5
"""Temperatures below this one mean greedy decoding, as in vLLM."""

# beyond these logits leave the range of fp32, and answers are no words
_MOST_BIAS = 1e6
_LEAST_PENALTY, _MOST_PENALTY = 1e-6, 1e6

_NUMBERS = (
    *("temperature", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
# and whether None has a meaning
_WHOLE = {
    **{"n": False, "top_k": False, "min_tokens": False},
    **{"seed": True, "max_tokens": True, "logprobs": True},
}


GrammarKind = Literal["json_object", "json_schema", "regex", "lark"]


@dataclass(frozen=True)
class Grammar:
    """What an output's text must look like. Needs the extra ``serve``, which brings llguidance."""

    kind: GrammarKind
    source: str = ""

    def __post_init__(self) -> None:
        known = get_args(GrammarKind)
        _require(self.kind in known, f"unknown grammar {self.kind!r}: use {', '.join(known)}")
        _require(isinstance(self.source, str), "a grammar's source is text")

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> "Grammar":
        """JSON that fits a schema, given as such or as JSON text."""
        if isinstance(schema, str):
            return cls("json_schema", schema)
        try:
            return cls("json_schema", json.dumps(schema, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidOption(f"this JSON schema can't be written as JSON: {error}") from error

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Text that a regular expression matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> "Grammar":
        """Text of a context-free grammar in Lark's notation."""
        return cls("lark", text)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidOption(message)


def _as_float(value: Any) -> Any:
    real = isinstance(value, Real | Decimal) and not isinstance(value, bool)
    if not real:
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except ValueError:
        # a decimal that signals not to be a number
        return math.nan


def _as_int(value: Any) -> Any:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return int(value) if whole else value


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks of its sampler. Every field has a default, and the defaults are vLLM's.
    Numbers may be of any kind, such as fractions and NumPy's: they become floats and ints.

    ``n``
        completions per prompt, each with its own random numbers.
    ``temperature``
        divides the logits; 0 takes the most likely token (greedy).
    ``top_p``, ``top_k``, ``min_p``
        keep the likeliest tokens: those before which less than ``top_p`` of the mass lies; the
        ``top_k`` first (0 or -1: all); those at least ``min_p`` times as likely as the likeliest.
    ``presence_penalty``, ``frequency_penalty``
        subtracted from the logits of tokens in the output: once, and once per occurrence.
    ``repetition_penalty``
        divides positive and multiplies negative logits of tokens in the prompt or the output.
    ``seed``
        makes the draws of this request the same in every batch; None draws anew each time.
    ``stop``, ``stop_token_ids``
        strings and tokens that end the output. They are not part of its text unless
        ``include_stop_str_in_output``.
    ``max_tokens``, ``min_tokens``
        limits on the output; None goes on to the end of the context. Before ``min_tokens`` no stop
        token can be drawn and no stop string counts.
    ``ignore_eos``
        goes on after an end-of-sequence token.
    ``logprobs``
        how many of the likeliest tokens to report at each step, besides the one drawn; None for
        none.
    ``logit_bias``
        token id to a number added to its logit.
    ``grammar``
        what the text must follow; the output ends with reason ``stop`` when it is complete, even
        before ``min_tokens``.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Iterable[str] | None = ()
    stop_token_ids: Iterable[int] | None = ()
    include_stop_str_in_output: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        self._freeze()
        self._convert_numbers()
        self._check_kinds()
        object.__setattr__(self, "top_k", max(self.top_k, 0) if self.top_k >= -1 else self.top_k)
        self._check_filters()
        self._check_penalties()
        self._check_ends()

    def _freeze(self) -> None:
        """Make tuples of what may be given as any collection."""
        try:
            stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
            ids = self.stop_token_ids
            stop_token_ids = () if ids is None else tuple(ids)
            bias = tuple(dict(self.logit_bias or ()).items())
        except (TypeError, ValueError) as error:
            raise InvalidOption(
                "stop is a string or several, stop_token_ids are token ids, and logit_bias is a "
                f"dict from token ids to numbers: {error}"
            ) from error
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        object.__setattr__(self, "logit_bias", bias)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken instead of one drawn."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def _convert_numbers(self) -> None:
        """Make floats and ints of numbers of other kinds; what is no number stays as it is."""
        for name in _NUMBERS:
            object.__setattr__(self, name, _as_float(getattr(self, name)))
        for name in _WHOLE:
            object.__setattr__(self, name, _as_int(getattr(self, name)))
        bias = tuple(
            (_as_int(i), _as_float(value)) for i, value in dict(self.logit_bias or ()).items()
        )
        object.__setattr__(self, "logit_bias", bias)
        ids = tuple(map(_as_int, self.stop_token_ids or ()))
        object.__setattr__(self, "stop_token_ids", ids)

    def _check_kinds(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            _require(isinstance(value, float), f"{name} must be a number, not {value!r}")
        for name, optional in _WHOLE.items():
            value = getattr(self, name)
            fits = isinstance(value, int) and not isinstance(value, bool)
            fits = fits or (optional and value is None)
            _require(fits, f"{name} must be a whole number, not {value!r}")
        stop = tuple(self.stop or ())
        _require(all(isinstance(s, str) for s in stop), f"stop must be strings, not {stop!r}")
        bias = dict(self.logit_bias or ())
        for name, ids in (("stop_token_ids", self.stop_token_ids or ()), ("logit_bias", bias)):
            fits = all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
            _require(fits, f"{name} names tokens by their ids, whole numbers, not {ids!r}")
        fits = all(isinstance(value, float) for value in bias.values())
        _require(fits, f"logit_bias has numbers as values, not {bias!r}")
        grammar = self.grammar
        _require(
            grammar is None or isinstance(grammar, Grammar),
            f"grammar is a Grammar, as in Grammar.json_object(), not {type(grammar).__name__}",
        )

    def _check_filters(self) -> None:
        _require(
            0.0 <= self.temperature < math.inf,
            f"temperature must be 0 (greedy) or a positive number, not {self.temperature}",
        )
        _require(0.0 < self.top_p <= 1.0, f"top_p must be above 0 and at most 1, not {self.top_p}")
        _require(self.top_k >= 0, f"top_k must be 0 or -1 (off) or positive, not {self.top_k}")
        _require(0.0 <= self.min_p <= 1.0, f"min_p must be from 0 to 1, not {self.min_p}")
        values = dict(self.logit_bias or ()).values()
        _require(
            all(value == -math.inf or abs(value) <= _MOST_BIAS for value in values),
            f"logit_bias values must be numbers up to {_MOST_BIAS:g}, or -inf to forbid a token",
        )

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2.0 <= value <= 2.0, f"{name} must be from -2 to 2, not {value}")
        _require(
            _LEAST_PENALTY <= self.repetition_penalty <= _MOST_PENALTY,
            f"repetition_penalty must be positive (1 is off), from {_LEAST_PENALTY:g} to "
            f"{_MOST_PENALTY:g}, not {self.repetition_penalty}",
        )

    def _check_ends(self) -> None:
        _require(self.n >= 1, f"n must be at least 1, not {self.n}")
        _require(
            self.n == 1 or not self.greedy,
            f"greedy decoding gives the same answer {self.n} times: "
            "use n=1, or a temperature above 0",
        )
        _require(
            self.max_tokens is None or self.max_tokens >= 1,
            f"max_tokens must be at least 1, or None for the rest of the context, "
            f"not {self.max_tokens}",
        )
        _require(self.min_tokens >= 0, f"min_tokens can't be negative, but is {self.min_tokens}")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}: "
            "raise max_tokens",
        )
        _require(all(self.stop or ()), "a stop string must not be empty: leave it out instead")
        _require(
            self.logprobs is None or self.logprobs >= 0,
            f"logprobs must be None or the number of likeliest tokens to report, "
            f"not {self.logprobs}",
        )
