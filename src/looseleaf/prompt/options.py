"""Checks of a call's keywords, with errors that explain the alternatives instead of TypeErrors."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Literal

from looseleaf.errors import InvalidOption, InvalidRequest
from looseleaf.sampling_params import SamplingParams

Method = Literal["generate", "chat", "stream"]

_POLICIES = ("fuse", "select", "revise")
_METHOD_OPTIONS: dict[Method, tuple[str, ...]] = {
    "generate": ("salt", "deadline"),
    "chat": ("salt", "deadline", "system_prompt"),
    "stream": ("salt", "deadline", "on_prefill"),
}
_SAMPLING = tuple(field.name for field in fields(SamplingParams))


def require_policies(method: Method, options: Mapping[str, object]) -> None:
    """Raises InvalidOption for a keyword that ``method`` does not have."""
    for name, value in options.items():
        if name not in _POLICIES:
            raise InvalidOption(f"{method} has no option {name!r}: {_advice(method, name, value)}")


def _advice(method: Method, name: str, value: object) -> str:
    known = (*_POLICIES, *_METHOD_OPTIONS[method])
    if name in _SAMPLING:
        return (
            "how tokens are drawn is said by SamplingParams, as in "
            f"llm.{method}(..., SamplingParams({name}={value!r}))"
        )
    if name == "stream":
        return "llm.stream gives the answer of one prompt as it grows, and so does AsyncLLM"
    matches = get_close_matches(name, (*known, *_SAMPLING), 1)
    if matches and matches[0] in _SAMPLING:
        guess = f"if {matches[0]} is meant, that goes into SamplingParams; "
    else:
        guess = f"did you mean {matches[0]}? " if matches else ""
    return (
        f"{guess}its options are {', '.join(known)}, and what is drawn is said by SamplingParams, "
        "as in SamplingParams(temperature=0)"
    )


def require_sampling(params: object) -> None:
    """Raises InvalidOption unless ``params`` is a SamplingParams."""
    if isinstance(params, Mapping):
        inner = ", ".join(f"{name}={value!r}" for name, value in params.items())
        raise InvalidOption(
            f"sampling parameters are a SamplingParams, not a dict: write SamplingParams({inner})"
        )
    if not isinstance(params, SamplingParams):
        raise InvalidOption(
            f"sampling parameters are a SamplingParams, not {type(params).__name__}: write them as "
            "in SamplingParams(temperature=0, max_tokens=64)"
        )


def sampling_per_prompt(params: object, num_prompts: int) -> list[SamplingParams]:
    """The sampling parameters of each prompt, from a list, a shared value or None for defaults.

    Raises InvalidOption for other types, InvalidRequest for a list of another length."""
    if params is None:
        return [SamplingParams()] * num_prompts
    if not isinstance(params, Sequence) or isinstance(params, str):
        require_sampling(params)
    per_prompt = [params] * num_prompts if isinstance(params, SamplingParams) else list(params)  # type: ignore[call-overload]
    for prompt_params in per_prompt:
        require_sampling(prompt_params)
    if len(per_prompt) != num_prompts:
        raise InvalidRequest(
            f"{num_prompts} prompts but {len(per_prompt)} sampling parameters: give one or as many"
        )
    return per_prompt
