"""What `tools.fuzz` asks, and of what engines: drawn at random, the same from the same seed."""

import random
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from looseleaf.config import Fuse, Revise, Select
from looseleaf.errors import InvalidOption
from looseleaf.prompt.request import DocumentPart, Policies, PromptParts, TextPart
from looseleaf.sampling_params import SamplingParams

VOCAB = 400
_LENGTHS = (0, 1, 5, 15, 16, 17, 33, 64, 100, 160)
_TEXTS = (1, 3, 17, 30, 70)
# how many prompts are of a few tokens only, and of how many
_FEW, _MOST_OF_FEW = 0.15, 5
# how many engines have too small a pool
_TIGHT = 0.2
_EVICTING = ("snapkv", "tova", "h2o")
_REVISED = ("quest", "representatives", "window")


class Ask(NamedTuple):
    """One request; ``parts`` and the rest as `Request` has them."""

    parts: PromptParts
    params: SamplingParams
    policies: Policies
    salt: str

    def __str__(self) -> str:
        lengths = [(type(part).__name__, len(part.tokens)) for part in self.parts]
        return f"{lengths} {self.policies} {self.params}"


@dataclass(frozen=True)
class Kind:
    """What is drawn of an engine; ``tiers`` has h for the host's memory, d for a disk and r for
    Redis, ``trouble`` s for slow tiers, f for tiers that fail, i for interrupts. The pool of a
    ``tight`` one is too small for the outputs that it is asked for together. One that ``hosts`` is
    to have documents outside of its pool; one without ``graphs`` launches every kernel of a GPU."""

    pages: int = 600
    chunk: int | None = None
    tiers: str = ""
    invariant: bool = False
    seqs: int = 8
    fp8: bool = False
    trouble: str = ""
    hosts: bool = False
    graphs: bool = True
    tight: bool = False


def chooses(policies: Policies) -> bool:
    """Whether what is computed again or read depends on scores."""
    fuse, select = policies.get("fuse"), policies.get("select")
    by_scores = fuse is not None and fuse.selector in ("deviation", "question", "links")
    return by_scores or (select is not None and select.policy != "window")


def is_plain(params: SamplingParams) -> bool:
    """Whether nothing moves what is likely."""
    return params.repetition_penalty == 1 and not params.presence_penalty


class Drawing:
    """What is asked, and of what engines."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        lengths = [draw.choice(_LENGTHS) for _ in range(8)]
        self.documents = [
            DocumentPart(self.tokens(length), 0, f"d{n}") for n, length in enumerate(lengths)
        ]
        self.leads = [(), (TextPart(self.tokens(7)),), (TextPart(self.tokens(40)),)]
        self.texts = [self.tokens(length) for length in _TEXTS]

    def tokens(self, count: int) -> tuple[int, ...]:
        """So many tokens, none of them special."""
        return tuple(self.draw.choices(range(2, VOCAB), k=count))

    def prompt(self) -> PromptParts:
        """A lead, documents with texts between some, a text; never two texts side by side."""
        draw, count = self.draw, self.draw.choice((0, 1, 2, 3, 5))
        twice = draw.random() < 0.5
        documents = draw.choices(self.documents, k=count) if twice else None
        lead = draw.choice(self.leads)
        context = draw.choice((0, sum(len(part.tokens) for part in lead)))
        drawn: list[DocumentPart | TextPart] = list(lead)
        for document in documents or draw.sample(self.documents, count):
            drawn.append(replace(document, context_length=context) if context else document)
            if draw.random() < 0.25:
                drawn.append(TextPart(draw.choice(self.texts)))
        text = draw.choice(self.texts)
        drawn.append(TextPart(text[: draw.randint(1, len(text))]))
        if draw.random() < _FEW:
            # a prompt that fills no page
            drawn = [TextPart(text[: draw.randint(1, _MOST_OF_FEW)])]
        parts: list[DocumentPart | TextPart] = []
        for part in drawn:
            if parts and isinstance(part, TextPart) and isinstance(parts[-1], TextPart):
                parts[-1] = TextPart(parts[-1].tokens + part.tokens)
            else:
                parts.append(part)
        return tuple(parts)

    def params(self) -> SamplingParams:
        """How tokens are drawn, and when an output ends."""
        draw = self.draw
        sampled = draw.random() < 0.3
        return SamplingParams(
            temperature=draw.choice((0.7, 1.0)) if sampled else 0.0,
            seed=draw.randrange(1000) if sampled else None,
            n=draw.choice((1, 1, 3)) if sampled else 1,
            max_tokens=draw.choice((1, 2, 5, 20, 40)),
            ignore_eos=draw.random() < 0.5,
            logprobs=4,
            stop_token_ids=(draw.randrange(VOCAB),) if draw.random() < 0.3 else (),
            repetition_penalty=draw.choice((1.0, 1.0, 1.3)),
            presence_penalty=draw.choice((0.0, 0.0, 0.5)),
            top_k=draw.choice((0, 0, 5)),
            top_p=draw.choice((1.0, 0.9)),
        )

    def policies(self) -> Policies:
        """What is blended, chosen and revised; nothing of what can't be put together."""
        told: dict[str, Any] = {}
        try:
            if self.draw.random() < 0.5:
                told["fuse"] = self._fuse()
            if self.draw.random() < 0.35:
                told |= self._select()
        except InvalidOption:
            pass
        return told  # type: ignore[return-value]

    def _fuse(self) -> Fuse:
        kinds = ("random", "first", "deviation", "question", "links", "all", "none", "ape")
        kind: Any = self.draw.choice(kinds)
        if kind in ("all", "none", "ape"):
            return Fuse(kind)
        if kind == "first":
            return Fuse("first", tokens=self.draw.choice((1, 8, 30)))
        if self.draw.random() < 0.5:
            return Fuse(kind, ratio=self.draw.choice((0.0, 0.1, 0.3, 0.7, 1.0)))
        return Fuse(kind, tokens=self.draw.choice((0, 1, 8, 50)))

    def _select(self) -> dict[str, Any]:
        kind: Any = self.draw.choice((*_REVISED, "partial", *_EVICTING))
        tokens = self.draw.choice((16, 48, 200))
        if kind in _EVICTING:
            return {"select": Select(kind, tokens=tokens)}
        layers = self.draw.choice(((), (0,)))
        budget: dict[str, Any] = {"tokens": tokens}
        if kind != "window" and self.draw.random() < 0.4:
            # up to a number of tokens, or as many as it takes
            budget = self.draw.choice(({}, budget)) | {"mass": self.draw.choice((0.3, 0.9, 1.0))}
        select = Select(kind, **budget, dense_below=0, dense_layers=layers)
        if kind not in _REVISED or self.draw.random() < 0.5:
            return {"select": select}
        return {"select": select, "revise": Revise(self.draw.choice((1, 2, 4)))}

    def _retrieval(self) -> Policies:
        """How hosted documents are read, and what can't stand beside that now and then."""
        draw = self.draw
        budget: dict[str, Any] = draw.choice(({"tokens": 20}, {"tokens": 60}, {"ratio": 1.0}))
        told: Policies = {
            "select": Select(
                "retrieval",
                **budget,
                dense_layers=draw.choice((None, (0,))),
                dense_below=draw.choice((None, 0, 60)),
                layer_budgets=draw.choice(("flat", "flat", "pyramid", (1.0, 3.0, 2.0))),
            )
        }
        if draw.random() < 0.35:
            told["revise"] = Revise(draw.choice((1, 2, 4)))
        if draw.random() < 0.2:
            told["fuse"] = self._fuse()
        return told

    def ask(self, *, hosts: bool = False) -> Ask:
        """A request; of an engine that ``hosts`` often one for hosted documents."""
        policies = self._retrieval() if hosts and self.draw.random() < 0.7 else self.policies()
        return Ask(self.prompt(), self.params(), policies, self.draw.choice(("", "", "a")))

    def long_ask(self) -> Ask:
        """A request of a short prompt and a long output, which grows until its pool is full."""
        text = TextPart(self.tokens(self.draw.randint(4, 40)))
        documents = self.draw.sample(self.documents, self.draw.choice((0, 0, 1)))
        short = [document for document in documents if 0 < len(document.tokens) <= 64]
        params = replace(
            self.params(), max_tokens=self.draw.randint(60, 120), ignore_eos=True, stop_token_ids=()
        )
        return Ask((*short, text), params, {}, self.draw.choice(("", "a")))

    def kind(self) -> Kind:
        """An engine."""
        if self.draw.random() < _TIGHT:
            tiers = self.draw.choice(("", "h", "r"))
            return Kind(
                pages=self.draw.choice((16, 20, 26)),
                chunk=self.draw.choice((None, 16, 64)),
                tiers=tiers,
                invariant=self.draw.random() < 0.2,
                trouble=self.draw.choice(("", "", "i")),
                tight=True,
            )
        draw = self.draw
        tiers = draw.choice(("", "", "h", "d", "hd", "r", "hr"))
        return Kind(
            pages=draw.choice((60, 90, 140, 400)),
            chunk=draw.choice((None, 16, 37, 64, 256)),
            tiers=tiers,
            invariant=draw.random() < 0.2,
            seqs=draw.choice((2, 8)),
            fp8=draw.random() < 0.2,
            trouble=draw.choice(("", "i", *(("s", "f", "si", "sfi") if tiers else ()))),
            hosts=draw.random() < 0.5,
            graphs=draw.random() < 0.7,
        )
