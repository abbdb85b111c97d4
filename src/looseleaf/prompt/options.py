"""What a call's keywords may be: a word that no method takes is explained, and not a TypeError."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Literal

from looseleaf.errors import InvalidOption, InvalidRequest
from looseleaf.sampling_params import SamplingParams

Method = Literal["generate", "chat", "stream"]

_POLICIES = ("fuse", "select", "revise")
_OTHERS: dict[Method, tuple[str, ...]] = {
    "generate": ("salt", "deadline"),
    "chat": ("salt", "deadline", "system_prompt"),
    "stream": ("salt", "deadline", "on_prefill"),
}
_SAMPLING = tuple(field.name for field in fields(SamplingParams))


def require_policies(method: Method, given: Mapping[str, object]) -> None:
    """Raise InvalidOption for a keyword that ``method`` does not have."""
    for name, value in given.items():
        if name not in _POLICIES:
            raise InvalidOption(f"{method} has no option {name!r}: {_instead(method, name, value)}")


def _instead(method: Method, name: str, value: object) -> str:
    known = (*_POLICIES, *_OTHERS[method])
    if name in _SAMPLING:
        return (
            "how tokens are drawn is said by SamplingParams, as in "
            f"llm.{method}(..., SamplingParams({name}={value!r}))"
        )
    if name == "stream":
        return "llm.stream gives the answer of one prompt as it grows, and so does AsyncLLM"
    near = get_close_matches(name, (*known, *_SAMPLING), 1)
    if near and near[0] in _SAMPLING:
        meant = f"if {near[0]} is meant, that goes into SamplingParams; "
    else:
        meant = f"did you mean {near[0]}? " if near else ""
    return (
        f"{meant}its options are {', '.join(known)}, and what is drawn is said by SamplingParams, "
        "as in SamplingParams(temperature=0)"
    )


def require_sampling(given: object) -> None:
    """Raise InvalidOption unless ``given`` is a SamplingParams."""
    if isinstance(given, Mapping):
        inner = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise InvalidOption(
            f"sampling parameters are a SamplingParams, not a dict: write SamplingParams({inner})"
        )
    if not isinstance(given, SamplingParams):
        raise InvalidOption(
            f"sampling parameters are a SamplingParams, not {type(given).__name__}: write them as "
            "in SamplingParams(temperature=0, max_tokens=64)"
        )


def sampling_of_each(given: object, num_prompts: int) -> list[SamplingParams]:
    """The sampling parameters of every prompt, where one may stand for all of them, and None for
    the defaults."""
    if given is None:
        return [SamplingParams()] * num_prompts
    if not isinstance(given, Sequence) or isinstance(given, str):
        require_sampling(given)
    each = [given] * num_prompts if isinstance(given, SamplingParams) else list(given)  # type: ignore[call-overload]
    for one in each:
        require_sampling(one)
    if len(each) != num_prompts:
        raise InvalidRequest(
            f"{num_prompts} prompts but {len(each)} sampling parameters: give one or as many"
        )
    return each
