"""What is judged: a checkpoint on its device, engines over it, and prompts cut from plain text.

Answers are teacher-forced: every request has a script, and the engine's logits are kept while the
tokens of the script go on. So answers of different runs can be compared token by token, however
close two of them were.
"""

import platform
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor

import looseleaf
from looseleaf.config import Fuse, IndexConfig, Revise, Select
from looseleaf.engine.engine import Engine
from looseleaf.engine.progress import RequestProgress
from looseleaf.engine.runner.batch import logit_sequences
from looseleaf.engine.scheduler import StepWork
from looseleaf.errors import InvalidOption
from looseleaf.graphs.step_result import StepResult
from looseleaf.llm.llm import make_config
from looseleaf.llm.load import (
    LoadedModel,
    find_model,
    load_model,
    longest_context,
    make_engine,
)
from looseleaf.models import read_config
from looseleaf.ops.page_dtypes import FP8
from looseleaf.prompt.request import DocumentPart, PromptParts, Request, TextPart
from looseleaf.sampling_params import SamplingParams
from looseleaf_lab.conformance.definition import Definition

SCRIPT_TOKENS = 8
LEAST_TOKENS = 160
_NAMES = [
    "Mira Tolland",
    "Jonas Reeve",
    "Adela Quist",
    "Piet Halloran",
    "Sanna Voss",
    "Emil Craddock",
]
_THINGS = [
    "archive",
    "mill",
    "travel desk",
    "map room",
    "boat house",
    "north gate",
    "press",
    "greenhouse",
]
_PLACES = ["Quorin", "Taqui House", "Mill Gate", "Old Harbour", "Lindow", "the east wing"]
_FORMS = (
    "The {thing} stands in {place}, and {name} keeps its keys. ",
    "{name} signs for the {thing} on every second day of the month. ",
    "When it rains in {place}, the {thing} is closed; ask {name} about it. ",
    "In {year} the {thing} was moved to {place}, which cost {count} crowns. ",
    "{name} wrote: the {thing} has {count} doors, and none of them faces {place}. ",
)


@dataclass(frozen=True)
class Asked:
    """A prompt, the tokens that follow it whatever the model says, and its policies."""

    parts: PromptParts
    script: tuple[int, ...]
    fuse: Fuse | None = None
    select: Select | None = None
    revise: Revise | None = None

    @property
    def tokens(self) -> list[int]:
        """All that the model reads to answer the script: prompt and script but its last token."""
        return [*(t for part in self.parts for t in part.tokens), *self.script[:-1]]


@dataclass(eq=False)
class ScriptedRunner:
    """A runner whose logits are kept, and whose next tokens are those of the requests' scripts."""

    runner: Any
    scripts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    kept: dict[str, list[Tensor]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def run(self, work: StepWork, previous: Tensor | None = None) -> StepResult:
        result: StepResult = self.runner.run(work, previous)
        logits = result.logits
        forced = torch.zeros_like(logits)
        for row, sequence in enumerate(logit_sequences(work)):
            script, kept = self.scripts[sequence.request_id], self.kept[sequence.request_id]
            # a step that was launched in vain has no token in the script
            forced[row, script[min(len(kept), len(script) - 1)]] = 1.0
            # a copy: the next step may write where these stand
            kept.append(logits[row].to(torch.float32, copy=True))
        return replace(result, logits=forced)


class Answering:
    """An engine under a script. Its pool is its own, its weights are the subject's."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._runner = ScriptedRunner(engine.runner)
        engine.runner = self._runner  # type: ignore[assignment]
        self._numbers = count()

    def ask(self, asked: Sequence[Asked]) -> list[Tensor]:
        """Logits ``[script, vocab_size]`` of requests that come together, fp32.

        Raises the error of a request that fails, and IntegrityError for a page that is lost."""
        return [logits for logits, _ in self.watch(asked)]

    def watch(self, asked: Sequence[Asked]) -> list[tuple[Tensor, RequestProgress]]:
        """The same, with the progress that tells what the engine did."""
        added = []
        for one in asked:
            name = f"conformance-{next(self._numbers)}"
            self._runner.scripts[name], self._runner.kept[name] = one.script, []
            params = SamplingParams(max_tokens=len(one.script), temperature=0.0, ignore_eos=True)
            request = Request(
                name, one.parts, params, fuse=one.fuse, select=one.select, revise=one.revise
            )
            added.append((name, len(one.script), self.engine.add(request)))
        while self.engine.has_work:
            self.engine.step()
        self.engine.check()
        for _, _, progress in added:
            if progress.error is not None:
                raise progress.error
        return [(torch.stack(self._runner.kept.pop(n)[:size]), p) for n, size, p in added]

    def host(self, asked: Asked, document: int) -> None:
        """Compute part number ``document`` of a prompt into the host's memory, with an index; what
        is in front of it must be what it was encoded behind. Raises as `Hosting.add` does."""
        before, hosted = asked.parts[document - 1], asked.parts[document]
        config = IndexConfig("flat", sink=4, local=12)
        job = self.engine.hosting.add((before, hosted, TextPart(())), "", config)
        while job.stage == "computing":
            self.engine.step()
        job.finished.wait()
        if job.error is not None:
            raise job.error

    @property
    def grouped_rows(self) -> int:
        """Rows that read something together so far."""
        return self.engine.runner.attention.counters.grouped_rows


class Subject:
    """A checkpoint under test. ``options`` are those of `looseleaf.LLM`; ``tokens`` is the length
    of the longest prompt with its answer, ``exactly`` or at most. Raises as `LLM` does, and
    InvalidOption for a length that the model can't read or that leaves no room for documents.
    """

    def __init__(
        self, model: str | None, options: dict[str, Any], tokens: int = 512, *, exactly: bool = True
    ) -> None:
        folder = find_model(model)
        longest = longest_context(read_config(folder))
        if not exactly and longest is not None:
            tokens = min(tokens, longest)
        if tokens < LEAST_TOKENS:
            raise InvalidOption(f"the laws need at least {LEAST_TOKENS} tokens, not {tokens}")
        self.options = {**options, "max_model_len": tokens}
        self.tokens = tokens
        self.loaded: LoadedModel = load_model(folder, make_config(self.options))
        cache = make_config(self.options).cache
        self.page_size = cache.page_size
        self.stored_in = FP8 if cache.kv_dtype == "fp8" else None
        self.definition = Definition(self.loaded, self.stored_in)
        self.cases = Cases(self)

    @property
    def dtype(self) -> torch.dtype:
        return self.loaded.decoder.dtype

    @property
    def device(self) -> torch.device:
        return self.loaded.decoder.device

    def answering(self, **overrides: Any) -> Answering:
        """A new engine with an empty pool, as the options say but for ``overrides``."""
        room = {"num_pages": 12 * -(-self.tokens // self.page_size) + 64}
        config = make_config({**room, **self.options, **overrides})
        return Answering(make_engine(self.loaded, config))


class Cases:
    """Prompts of every kind that the laws speak of, of ragged lengths, from the subject's own
    tokenizer.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._tokenizer = subject.loaded.tokenizer
        size, page = subject.tokens, subject.page_size
        bos = self._tokenizer.bos_token_id
        self.lead = (*([] if bos is None else [bos]), *self.text(1, size // 16 + 3))
        # several pages and a bit; less than a page; whole pages; once more ragged
        lengths = (size // 5 + 3, 5, max(1, min(2 * page, size // 8)), size // 8 + 1)
        self.documents = [self.text(10 + n, length) for n, length in enumerate(lengths)]
        self.between = self.text(2, size // 16 + 2)
        self.question = self.text(3, size // 32 + 4)

    def text(self, seed: int, length: int) -> tuple[int, ...]:
        """``length`` tokens of text, the same for the same seed."""
        draw, ids = random.Random(seed), list[int]()
        while len(ids) < length:
            sentence = draw.choice(_FORMS).format(
                name=draw.choice(_NAMES),
                thing=draw.choice(_THINGS),
                place=draw.choice(_PLACES),
                year=draw.randrange(1700, 2000),
                count=draw.randrange(3, 900),
            )
            ids += self._tokenizer.encode(sentence)
        return tuple(ids[:length])

    def asked(self, *parts: tuple[int, ...] | int) -> Asked:
        """A prompt of texts and documents; a number is one of ``documents``, encoded behind the
        lead, a negative one (-1 for the first) encoded behind nothing but the first token."""
        made: list[TextPart | DocumentPart] = []
        alone = int(self._tokenizer.bos_token_id is not None)
        for part in parts:
            if isinstance(part, int):
                number = part if part >= 0 else -part - 1
                context = len(self.lead) if part >= 0 else alone
                made.append(DocumentPart(self.documents[number], context, f"document {number}"))
            else:
                made.append(TextPart(part))
        return Asked(tuple(made), self.text(len(parts), SCRIPT_TOKENS))

    @cached_property
    def exact(self) -> Asked:
        """One document directly behind what it was encoded behind."""
        return self.asked(self.lead, 0, self.question)

    @cached_property
    def exact_at_full_length(self) -> Asked:
        """The same with as much text behind the document as `plain` has in all."""
        length = self._subject.tokens - SCRIPT_TOKENS - len(self.lead) - len(self.documents[0])
        return self.asked(self.lead, 0, self.text(6, length))

    @cached_property
    def several(self) -> Asked:
        """Documents at several offsets, one of them twice, one encoded alone, text between."""
        return self.asked(self.lead, 0, 1, self.between, -3, 3, 0, self.question)

    @cached_property
    def others(self) -> list[Asked]:
        """Requests that share documents and text with `several`, at other places."""
        longer = self.text(4, len(self.question) + 3)
        return [
            self.asked(self.lead, 3, 0, self.question),
            self.asked(self.lead, 2, self.between, 0, longer),
            self.asked(self.lead, 0, longer),
            self.plain,
        ]

    @cached_property
    def plain(self) -> Asked:
        """Text alone, as long as may be."""
        length = self._subject.tokens - SCRIPT_TOKENS - len(self.lead)
        return self.asked((*self.lead, *self.text(5, length)))


def describe_subject(subject: Subject, name: str) -> dict[str, str]:
    """What is judged, where and by what versions, in words."""
    device, shape = subject.device, subject.loaded.shape
    machine = platform.processor() or platform.machine()
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    narrow = "" if subject.stored_in is None else " in eight bits"
    return {
        "model": name,
        "shape": f"{shape.family}, RoPE {' and '.join(r.law for r in shape.ropes)}",
        "dtype": str(subject.dtype).removeprefix("torch."),
        "device": f"{device} ({machine})",
        "tokens": f"{subject.tokens} tokens, pages of {subject.page_size}{narrow}",
        "versions": f"looseleaf {looseleaf.__version__}, torch {torch.__version__}",
    }
