"""Variants of a tokenizer for text after a marker and for text in the middle of a text.

SentencePiece-style tokenizers prepend a space to a text. The scheme ``first`` prepends it to the
first piece only, ``always`` to each piece that follows a marker. Text in the middle gets no space.
"""

from collections.abc import Callable, Mapping
from typing import Any

Description = Mapping[str, Any]
Step = dict[str, Any]


def prepend_scheme(step: Description) -> str:
    """The prepend scheme of a Metaspace step: ``first``, ``always`` or ``never``."""
    legacy = "never" if step.get("add_prefix_space") is False else "always"
    return str(step.get("prepend_scheme") or legacy)


def behind_marker(described: Description) -> Description:
    """The tokenizer for a piece that follows a marker; ``described`` itself if equal."""
    return _rewritten(described, "pre_tokenizer", _without_first)


def in_the_middle(described: Description) -> Description:
    """The tokenizer for text in the middle of a text; ``described`` itself if equal."""
    normalized = _rewritten(described, "normalizer", _without_prepend)
    return _rewritten(normalized, "pre_tokenizer", _without_prefix)


def prepends(described: Description) -> bool:
    """Whether a normalizer prepends text to each piece that follows an added token."""
    return _rewritten(described, "normalizer", _without_prepend) is not described


def _without_first(step: Step, leads: bool) -> Step:
    if step.get("type") == "Metaspace" and prepend_scheme(step) == "first":
        return {**step, "prepend_scheme": "never"}
    return step


def _without_prefix(step: Step, leads: bool) -> Step:
    # a later step sees words, and the space before each word is intended
    if leads and step.get("type") == "Metaspace" and prepend_scheme(step) == "always":
        return {**step, "prepend_scheme": "never"}
    if leads and step.get("type") == "ByteLevel" and step.get("add_prefix_space"):
        return {**step, "add_prefix_space": False}
    return _without_first(step, leads)


def _without_prepend(step: Step, leads: bool) -> Step:
    # an empty Prepend has no effect and keeps the length of the sequence
    return {**step, "prepend": ""} if step.get("type") == "Prepend" else step


def _rewritten(
    described: Description, stage: str, rewrite: Callable[[Step, bool], Step]
) -> Description:
    step = described.get(stage)
    changed = _walk(step, rewrite, True) if step else step
    return described if changed == step else {**described, stage: changed}


def _walk(step: Step, rewrite: Callable[[Step, bool], Step], leads: bool) -> Step:
    for inner in ("normalizers", "pretokenizers"):
        if inner in step:
            steps = [_walk(part, rewrite, leads and n == 0) for n, part in enumerate(step[inner])]
            return {**step, inner: steps}
    return rewrite(step, leads)
