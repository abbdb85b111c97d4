"""Requests of a load: prompts of given lengths, shared documents, and bodies in OpenAI's form."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from looseleaf.errors import InvalidOption

Kind = Literal["chat", "completions"]
DocumentsAs = Literal["text", "field", "id"]
_WORDS = (
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
)


@dataclass(frozen=True)
class Span:
    """Lengths from ``low`` to ``high``, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Span":
        """``512`` or ``100-900``. Raises InvalidOption for other text."""
        low, _, high = text.partition("-")
        if not low.isdecimal() or not (high or low).isdecimal():
            raise InvalidOption(f"a length is a number or a range such as 100-900, not {text!r}")
        if not 1 <= int(low) <= int(high or low):
            raise InvalidOption(f"the range {text!r} is empty or has a length of 0")
        return cls(int(low), int(high or low))

    def draw(self, rng: random.Random) -> int:
        """A length, uniformly distributed."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True)
class Prompt:
    """Texts of shared documents, the text after them, and the length of the output (tokens).

    ``at`` is the time of its arrival after the start (s). In a closed loop, prompts with a positive
    time enter beside the streams."""

    documents: tuple[str, ...]
    text: str
    output: int
    at: float = 0.0


@dataclass(frozen=True)
class Endpoint:
    """The form of requests. ``ids`` maps texts of documents to registered ids."""

    url: str
    model: str
    key: str = ""
    kind: Kind = "chat"
    documents_as: DocumentsAs = "text"
    ignore_eos: bool = False
    ids: Mapping[str, str] | None = None


def words(seed: int | str, count: int) -> str:
    """``count`` words of a text that depends on ``seed`` only; a longer text has it as its head."""
    return " ".join(random.Random(f"text {seed}").choices(_WORDS, k=count))


def make_prompts(
    number: int,
    lengths: tuple[Span, Span],
    documents: Sequence[str],
    per_request: int,
    words_per_token: float = 1.0,
    seed: int = 0,
) -> list[Prompt]:
    """``number`` prompts with input and output ``lengths``, each over random documents."""
    rng = random.Random(seed)
    prompts = []
    for n in range(number):
        length = max(1, round(lengths[0].draw(rng) * words_per_token))
        texts = tuple(rng.sample(documents, min(per_request, len(documents))))
        prompts.append(Prompt(texts, words(f"{seed} prompt {n}", length), lengths[1].draw(rng)))
    return prompts


def make_body(endpoint: Endpoint, prompt: Prompt) -> dict[str, Any]:
    """The JSON of a streamed request."""
    body: dict[str, Any] = {
        "model": endpoint.model,
        "max_tokens": prompt.output,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text = prompt.text
    if prompt.documents and endpoint.documents_as == "text":
        text = "\n\n".join((*prompt.documents, text))
    elif prompt.documents and endpoint.documents_as == "field":
        body["documents"] = [{"text": document} for document in prompt.documents]
    elif prompt.documents:
        body["documents"] = [{"id": (endpoint.ids or {})[d]} for d in prompt.documents]
    if endpoint.kind == "chat":
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    if endpoint.ignore_eos:
        body["ignore_eos"] = True
    return body
