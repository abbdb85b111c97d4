"""The subject of a conformance check: a checkpoint, engines over it, and prompts of plain text.

Every request has a script of forced answer tokens, and the engine's logits are recorded.
Logits of different runs are therefore comparable token by token, even where two tokens nearly tie.
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
from looseleaf.engine.runner.step_sampler import logit_sequences
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
class ScriptedRequest:
    """A prompt, its forced answer tokens, and its policies."""

    parts: PromptParts
    script: tuple[int, ...]
    fuse: Fuse | None = None
    select: Select | None = None
    revise: Revise | None = None

    @property
    def tokens(self) -> list[int]:
        """Tokens of the prompt and of the script except its last: the input of a dense pass."""
        return [*(t for part in self.parts for t in part.tokens), *self.script[:-1]]


@dataclass(eq=False)
class ScriptedRunner:
    """A runner that records logits and forces the next tokens of the requests' scripts."""

    runner: Any
    scripts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    logits: dict[str, list[Tensor]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def run(self, work: StepWork, previous: Tensor | None = None) -> StepResult:
        result: StepResult = self.runner.run(work, previous)
        logits = result.logits
        forced = torch.zeros_like(logits)
        for row, sequence in enumerate(logit_sequences(work)):
            request_id = sequence.request_id
            script, logits_so_far = self.scripts[request_id], self.logits[request_id]
            # a speculative step past the script has no token of its own
            forced[row, script[min(len(logits_so_far), len(script) - 1)]] = 1.0
            # a copy, because the next step may overwrite the logits
            logits_so_far.append(logits[row].to(torch.float32, copy=True))
        return replace(result, logits=forced)


class ScriptedEngine:
    """An engine with a pool of its own, the subject's weights, and scripted answers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._runner = ScriptedRunner(engine.runner)
        engine.runner = self._runner  # type: ignore[assignment]
        self._numbers = count()

    def run(self, requests: Sequence[ScriptedRequest]) -> list[Tensor]:
        """Logits ``[script, vocab_size]``, fp32, of requests that are added together.

        Raises a failed request's own error, and IntegrityError for a lost page."""
        return [logits for logits, _ in self.run_with_progress(requests)]

    def run_with_progress(
        self, requests: Sequence[ScriptedRequest]
    ) -> list[tuple[Tensor, RequestProgress]]:
        """The logits of `run`, each with its request's progress."""
        submitted = []
        for scripted in requests:
            name = f"conformance-{next(self._numbers)}"
            self._runner.scripts[name], self._runner.logits[name] = scripted.script, []
            length = len(scripted.script)
            request = Request(
                name,
                scripted.parts,
                SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True),
                fuse=scripted.fuse,
                select=scripted.select,
                revise=scripted.revise,
            )
            submitted.append((name, length, self.engine.add(request)))
        while self.engine.has_work:
            self.engine.step()
        self.engine.check()
        for _, _, progress in submitted:
            if progress.error is not None:
                raise progress.error
        return [(torch.stack(self._runner.logits.pop(n)[:size]), p) for n, size, p in submitted]

    def host(self, request: ScriptedRequest, document: int) -> None:
        """Compute part number ``document`` of a prompt into host memory and index it.

        The part before it must be the document's own context. Raises as `Hosting.add` does."""
        context_part, hosted = request.parts[document - 1], request.parts[document]
        config = IndexConfig("flat", sink=4, local=12)
        job = self.engine.hosting.add((context_part, hosted, TextPart(())), "", config)
        while job.stage == "computing":
            self.engine.step()
        job.finished.wait()
        if job.error is not None:
            raise job.error

    @property
    def grouped_rows(self) -> int:
        """Number of rows so far that shared a read of keys with another row."""
        return self.engine.runner.attention.counters.grouped_rows


class Subject:
    """A checkpoint under test. ``options`` are the options of `looseleaf.LLM`.

    ``tokens`` is the length of the longest prompt with its answer; without ``exactly``, the model's
    own limit may lower it. Raises as `LLM` does, and InvalidOption for an unsupported length.
    """

    def __init__(
        self, model: str | None, options: dict[str, Any], tokens: int = 512, *, exactly: bool = True
    ) -> None:
        folder = find_model(model)
        longest = longest_context(read_config(folder))
        if not exactly and longest is not None:
            tokens = min(tokens, longest)
        if tokens < LEAST_TOKENS:
            raise InvalidOption(
                f"the laws need at least {LEAST_TOKENS} tokens, not {tokens}: raise --tokens, or "
                "choose a model with a longer context"
            )
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

    def scripted_engine(self, **overrides: Any) -> ScriptedEngine:
        """A new engine with an empty pool; ``overrides`` replace the subject's options."""
        room = {"num_pages": 12 * -(-self.tokens // self.page_size) + 64}
        config = make_config({**room, **self.options, **overrides})
        return ScriptedEngine(make_engine(self.loaded, config))


class Cases:
    """Prompts of ragged lengths for the laws, encoded by the subject's tokenizer."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._tokenizer = subject.loaded.tokenizer
        size, page = subject.tokens, subject.page_size
        bos = self._tokenizer.bos_token_id
        self.lead = (*([] if bos is None else [bos]), *self.text(1, size // 16 + 3))
        # several pages and a remainder; less than a page; whole pages; ragged again
        lengths = (size // 5 + 3, 5, max(1, min(2 * page, size // 8)), size // 8 + 1)
        self.documents = [self.text(10 + n, length) for n, length in enumerate(lengths)]
        self.between = self.text(2, size // 16 + 2)
        self.question = self.text(3, size // 32 + 4)

    def text(self, seed: int, length: int) -> tuple[int, ...]:
        """``length`` tokens of text that depend only on ``seed``."""
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

    def request(self, *parts: tuple[int, ...] | int) -> ScriptedRequest:
        """A prompt of texts and documents.

        A number n >= 0 is document n, encoded after the lead. A negative number n is document
        -n - 1, encoded after the first token alone."""
        prompt: list[TextPart | DocumentPart] = []
        context_alone = int(self._tokenizer.bos_token_id is not None)
        for part in parts:
            if isinstance(part, int):
                number = part if part >= 0 else -part - 1
                context = len(self.lead) if part >= 0 else context_alone
                prompt.append(DocumentPart(self.documents[number], context, f"document {number}"))
            else:
                prompt.append(TextPart(part))
        return ScriptedRequest(tuple(prompt), self.text(len(parts), SCRIPT_TOKENS))

    @cached_property
    def one_document(self) -> ScriptedRequest:
        """One document directly after its own context, where reuse is exact."""
        return self.request(self.lead, 0, self.question)

    @cached_property
    def document_at_full_length(self) -> ScriptedRequest:
        """`one_document` with a question that fills the prompt to the length of `text_only`."""
        length = self._subject.tokens - SCRIPT_TOKENS - len(self.lead) - len(self.documents[0])
        return self.request(self.lead, 0, self.text(6, length))

    @cached_property
    def several(self) -> ScriptedRequest:
        """Documents at several offsets: one repeated, one encoded alone, text between them."""
        return self.request(self.lead, 0, 1, self.between, -3, 3, 0, self.question)

    @cached_property
    def sharing(self) -> list[ScriptedRequest]:
        """Requests that share documents and text with `several`, at other positions."""
        longer = self.text(4, len(self.question) + 3)
        return [
            self.request(self.lead, 3, 0, self.question),
            self.request(self.lead, 2, self.between, 0, longer),
            self.request(self.lead, 0, longer),
            self.text_only,
        ]

    @cached_property
    def text_only(self) -> ScriptedRequest:
        """Text without documents, of the full length."""
        length = self._subject.tokens - SCRIPT_TOKENS - len(self.lead)
        return self.request((*self.lead, *self.text(5, length)))


def describe_subject(subject: Subject, name: str) -> dict[str, str]:
    """Name, shape, dtype, device, lengths and versions of a subject, as text."""
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
