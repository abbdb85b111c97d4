"""Traces in Mooncake's JSONL form: arrival, lengths, and ids of prompt blocks of 512 tokens."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from looseleaf.errors import InvalidOption
from looseleaf_lab.bench.endpoint.workload import Prompt, words

BLOCK = 512


@dataclass(frozen=True)
class TraceLine:
    """A request: arrival (ms), lengths (tokens), and one id per block of its input."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(lines: Iterable[str], name: str) -> list[TraceLine]:
    """All requests by arrival; blank lines are skipped.

    Raises InvalidOption, with the line's number, for a line of another form."""
    trace = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            trace.append(_parse(json.loads(line)))
        except ValueError as error:
            raise InvalidOption(f"{name}, line {number}: {error}") from error
    if not trace:
        raise InvalidOption(f"{name} has no requests")
    return sorted(trace, key=lambda entry: entry.timestamp)


def trace_prompts(
    trace: Iterable[TraceLine], speed: float = 1.0, words_per_token: float = 1.0
) -> list[Prompt]:
    """Prompts whose full blocks are documents by hash id; the last block is the text after them.

    Arrivals start at 0 and are ``speed`` times as fast."""
    entries = list(trace)
    start = entries[0].timestamp if entries else 0.0
    block_words = max(1, round(BLOCK * words_per_token))
    prompts = []
    for entry in entries:
        *shared, last = entry.hash_ids
        length = entry.input_length - BLOCK * len(shared)
        prompts.append(
            Prompt(
                tuple(words(block, block_words) for block in shared),
                words(last, max(1, round(length * words_per_token))),
                entry.output_length,
                (entry.timestamp - start) / 1e3 / speed,
            )
        )
    return prompts


def _parse(entry: Any) -> TraceLine:
    if not isinstance(entry, dict):
        raise ValueError("a request is a JSON object")
    for field in ("timestamp", "input_length", "output_length", "hash_ids"):
        if field not in entry:
            raise ValueError(f"the field {field} is missing")
    timestamp, ids = entry["timestamp"], entry["hash_ids"]
    # a bool is an int in Python
    if type(timestamp) not in (int, float) or not 0 <= timestamp < float("inf"):
        raise ValueError("timestamp must be a number of milliseconds")
    for field in ("input_length", "output_length"):
        if type(entry[field]) is not int or entry[field] < 1:
            raise ValueError(f"{field} must be a positive whole number")
    if not isinstance(ids, list) or any(type(block) is not int for block in ids):
        raise ValueError("hash_ids must be a list of whole numbers")
    blocks = -(-entry["input_length"] // BLOCK)
    if len(ids) != blocks:
        raise ValueError(
            f"{entry['input_length']} tokens are {blocks} blocks of {BLOCK}, but hash_ids has "
            f"{len(ids)}"
        )
    return TraceLine(timestamp, entry["input_length"], entry["output_length"], tuple(ids))
