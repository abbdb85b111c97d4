"""Sampling parameters of a request, with the names and meanings of vLLM."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from numbers import Integral, Real
from typing import Any, Literal, get_args

from looseleaf.config.option import (
    require,
    require_each,
    require_not_negative,
    require_share,
    shown,
)
from looseleaf.errors import InvalidOption

GREEDY_BELOW = 1e-5
"""Temperatures below this value mean greedy decoding, as in vLLM."""

# beyond these values logits exceed the range of fp32
_MOST_BIAS = 1e6
_LEAST_PENALTY, _MOST_PENALTY = 1e-6, 1e6

_NUMBERS = (
    *("temperature", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
# integers, and whether None is valid
_WHOLE = {
    **{"n": False, "top_k": False, "min_tokens": False},
    **{"seed": True, "max_tokens": True, "logprobs": True, "prompt_logprobs": True},
    "prompt_logprobs_start": False,
}


GrammarKind = Literal["json_object", "json_schema", "regex", "lark", "calls"]


@dataclass(frozen=True)
class Grammar:
    """A grammar that constrains the text of an output. Needs the extra ``serve`` (llguidance).

    The source of ``calls`` is the JSON of a `CallBlock`, for tool calls.
    ``strict`` forbids additional properties in the objects of a JSON schema. Raises InvalidOption
    for an unknown kind, and for ``strict`` with another kind than ``json_schema``.
    """

    kind: GrammarKind
    source: str = ""
    strict: bool = False

    def __post_init__(self) -> None:
        known = get_args(GrammarKind)
        require(self.kind in known, f"unknown grammar {shown(self.kind)}: use {', '.join(known)}")
        message = f"a grammar's source must be a string, not {shown(self.source)}"
        require(isinstance(self.source, str), message)
        message = f"strict must be true or false, not {shown(self.strict)}"
        require(isinstance(self.strict, bool), message)
        message = f"strict belongs to a JSON schema, not to a {self.kind} grammar"
        require(not self.strict or self.kind == "json_schema", message)

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str, strict: bool = False) -> "Grammar":
        """JSON that satisfies a schema, a mapping or its JSON text.

        With ``strict``, objects with ``properties`` have no further properties, unless the schema
        sets their ``additionalProperties``. Raises InvalidOption for a schema that is not JSON.
        """
        if isinstance(schema, str):
            return cls("json_schema", schema, strict)
        try:
            return cls("json_schema", json.dumps(schema, allow_nan=False), strict)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidOption(f"the JSON schema can't be written as JSON: {error}") from error

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Text that a regular expression matches in full."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> "Grammar":
        """Text of a context-free grammar in Lark's notation."""
        return cls("lark", text)


def _as_float(value: Any) -> Any:
    real = isinstance(value, Real | Decimal) and not isinstance(value, bool)
    if not real:
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except ValueError:
        # a signaling NaN of decimal
        return math.nan


def _as_int(value: Any) -> Any:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return int(value) if whole else value


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request. Defaults are vLLM's. Raises InvalidOption for bad values.

    Numbers of other types, such as fractions and NumPy scalars, are converted to float and int.

    ``n``
        completions per prompt, each with its own random numbers.
    ``temperature``
        divisor of the logits; 0 selects the most likely token (greedy).
    ``top_p``
        keeps the most likely tokens up to this cumulative probability.
    ``top_k``
        keeps this number of the most likely tokens; 0 or -1 keeps all.
    ``min_p``
        keeps tokens with at least this share of the highest probability.
    ``presence_penalty``, ``frequency_penalty``
        subtracted from the logits of tokens in the output: once, and once per occurrence.
    ``repetition_penalty``
        divides positive and multiplies negative logits of tokens in the prompt or the output.
    ``seed``
        makes the draws of this request equal in every batch; None draws new random numbers.
    ``stop``, ``stop_token_ids``
        strings and tokens that end the output. Its text excludes them unless
        ``include_stop_str_in_output``.
    ``max_tokens``, ``min_tokens``
        limits of the output; ``max_tokens`` None is the end of the context, and 0 computes the
        prompt only. Before ``min_tokens``
        stop tokens are not drawn and stop strings are ignored.
    ``ignore_eos``
        continues after an end-of-sequence token.
    ``logprobs``
        number of most likely tokens to report at each step, besides the drawn token; None reports
        no logprobs.
    ``prompt_logprobs``, ``prompt_logprobs_start``
        number of most likely tokens to report for each prompt token, besides the token itself; None
        reports none. The start is the index of the first reported token. Rows from there on are
        computed even if the prefix cache has them. A token is reported if its predecessor is text,
        so tokens inside documents are not.
    ``logit_bias``
        maps token ids to numbers that are added to their logits.
    ``grammar``
        constraint of the text. The output ends with reason ``stop`` when the text is complete, even
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
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
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
        """Convert collections to tuples."""
        try:
            stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
            ids = self.stop_token_ids
            stop_token_ids = () if ids is None else tuple(ids)
            bias = tuple(dict(self.logit_bias or ()).items())
        except (TypeError, ValueError) as error:
            raise InvalidOption(
                "stop is a string or a list of strings, stop_token_ids are token ids, and "
                f"logit_bias is a dict from token ids to numbers: {error}"
            ) from error
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        object.__setattr__(self, "logit_bias", bias)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is selected instead of a random one."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty is set."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def _convert_numbers(self) -> None:
        """Convert numbers of other types to float and int; keep other values."""
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
            require(isinstance(value, float), f"{name} must be a number, not {shown(value)}", name)
        for name, optional in _WHOLE.items():
            value = getattr(self, name)
            fits = isinstance(value, int) and not isinstance(value, bool)
            fits = fits or (optional and value is None)
            require(fits, f"{name} must be a whole number, not {shown(value)}", name)
        stop = tuple(self.stop or ())
        message = f"stop must be strings, not {shown(stop)}"
        require(all(isinstance(s, str) for s in stop), message, "stop")
        bias = dict(self.logit_bias or ())
        for name, ids in (("stop_token_ids", self.stop_token_ids or ()), ("logit_bias", bias)):
            fits = all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
            message = f"{name} must name tokens by their ids, whole numbers, not {shown(ids)}"
            require(fits, message, name)
        fits = all(isinstance(value, float) for value in bias.values())
        message = f"logit_bias must have numbers as values, not {shown(bias)}"
        require(fits, message, "logit_bias")
        grammar = self.grammar
        require(
            grammar is None or isinstance(grammar, Grammar),
            f"grammar is a Grammar, as in Grammar.json_object(), not {type(grammar).__name__}",
            "grammar",
        )

    def _check_filters(self) -> None:
        rule = "0 (greedy) or a positive number"
        require_each(self, rule, lambda value: 0.0 <= value < math.inf, "temperature")
        require_share(self, "top_p")
        require_each(self, "0 or -1 (off) or positive", lambda value: value >= 0, "top_k")
        require_share(self, "min_p", zero=True)
        values = dict(self.logit_bias or ()).values()
        beyond = [v for v in values if not (v == -math.inf or abs(v) <= _MOST_BIAS)]
        require(
            not beyond,
            f"logit_bias must have values up to {_MOST_BIAS:g}, or -inf to forbid a token, not "
            f"{shown(beyond[0] if beyond else 0)}",
            "logit_bias",
        )

    def _check_penalties(self) -> None:
        both = ("presence_penalty", "frequency_penalty")
        require_each(self, "from -2 to 2", lambda value: -2.0 <= value <= 2.0, *both)
        least, most = _LEAST_PENALTY, _MOST_PENALTY
        rule = f"positive (1 is off), from {least:g} to {most:g}"
        require_each(self, rule, lambda value: least <= value <= most, "repetition_penalty")

    def _check_ends(self) -> None:
        require_each(self, "at least 1", lambda value: value >= 1, "n")
        require(
            self.n == 1 or not self.greedy,
            f"greedy decoding gives {self.n} equal answers: use n=1, or a temperature above 0",
            "n",
            "temperature",
        )
        require_not_negative(self, "max_tokens", "min_tokens", "logprobs")
        require_not_negative(self, "prompt_logprobs", "prompt_logprobs_start")
        require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}: "
            "raise max_tokens",
            "min_tokens",
            "max_tokens",
        )
        require(all(self.stop or ()), "stop must not contain an empty string: leave it out", "stop")
