"""A whole token under a select policy: an engine with random weights over random keys.

Prompts are not computed: their pages hold random numbers, at the same cost per step. Adjacent rows
select different pages of random keys, so revised rows read more than in a real model."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch import Tensor

from looseleaf.config import CacheConfig, EngineConfig, Revise, SchedulerConfig, Select
from looseleaf.engine.engine import Engine
from looseleaf.engine.progress import RequestProgress
from looseleaf.engine.runner.runner import Runner
from looseleaf.engine.scheduler import StepWork
from looseleaf.graphs.step_result import StepResult
from looseleaf.prompt.request import Request, TextPart
from looseleaf.retro import free_rows, window_for
from looseleaf.sampling_params import SamplingParams
from looseleaf_lab.bench.model_shapes import MODEL_SHAPES
from looseleaf_lab.bench.random_model import random_engine

_SEED_TOKENS = 1_000
# steps to fill the widest window and capture graphs
_BEFORE = 12


class _PrefillSkipper(Runner):
    """A runner that does not compute steps with prompts."""

    def run(self, work: StepWork, previous: Tensor | None = None) -> StepResult:
        """Random logits for a step with a prompt."""
        if not work.chunks:
            return super().run(work, previous)
        num_logits = len(work.decode) + sum(chunk.ends_prompt for chunk in work.chunks)
        size = num_logits, self.model.config.vocab_size
        return StepResult.of_chunks(torch.randn(*size, device=self.model.device))


@dataclass(eq=False)
class TokenArms:
    """Timers of decode steps of ``batch`` outputs after ``context`` tokens each (s).

    ``bytes_read`` has the bytes per step of every arm that has run."""

    shape: str
    policy: Select
    context: int
    batch: int
    new_tokens: int
    device: torch.device
    bytes_read: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        outputs = self.new_tokens + _BEFORE + 2
        pages = -(-(self.context + outputs) // 16) * self.batch
        cache = CacheConfig(num_pages=pages, prefix_caching=False)
        scheduler = SchedulerConfig(
            max_num_seqs=max(64, self.batch),
            max_num_batched_tokens=max(2048, self.context * self.batch),
        )
        config = EngineConfig(
            device=str(self.device), max_model_len=self.context + outputs, cache=cache,
            scheduler=scheduler,
        )  # fmt: skip
        self._engine: Engine = random_engine(self.shape, config, self.device)
        self._engine.runner = _PrefillSkipper(**vars(self._engine.runner))
        self._engine.store.pool.kv.normal_()
        self._names = count()

    def dense(self) -> float:
        """A step with dense attention (s)."""
        return self._seconds_per_step("dense", None, None)

    def revision_arm(self, window: int, *, adaptive: bool = False) -> Callable[[], float]:
        """A timer of steps with selection and a window of ``window`` rows."""
        name = self.arm_name(window, adaptive=adaptive)
        revise = Revise(window, adaptive=adaptive)
        return lambda: self._seconds_per_step(name, self.policy, revise)

    def served_arm(self, number: int) -> Callable[[], float]:
        """A timer of steps in which one choice serves ``number`` layers."""
        layers = MODEL_SHAPES[self.shape].num_layers
        choosing = [n for n in range(layers) if n not in self.policy.layers_read_densely]
        select = replace(self.policy, anchors=tuple(choosing[::number]))
        return lambda: self._seconds_per_step(served_name(number), select, None)

    def engine_default(self) -> float:
        """A step under the engine's own limit for dense attention (s)."""
        return self._seconds_per_step("left alone", replace(self.policy, dense_below=None), None)

    def arm_name(self, window: int, *, adaptive: bool = False) -> str:
        """The name of the arm; an adaptive window includes its actual width."""
        if adaptive:
            return f"w<={window} is {self._width(window, adaptive)}"
        return "select" if window == 1 else f"w={window}"

    def _width(self, window: int, adaptive: bool) -> int:
        if not adaptive:
            return window
        free = free_rows(self.device, self._engine.runner.model.dtype.itemsize)
        return window_for(window, self.batch, free)

    def _seconds_per_step(self, name: str, select: Select | None, revise: Revise | None) -> float:
        engine, params = self._engine, SamplingParams(
            max_tokens=self.new_tokens + _BEFORE + 1, temperature=0.0, ignore_eos=True
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        vocab_size = min(MODEL_SHAPES[self.shape].vocab_size, _SEED_TOKENS)
        submitted = []
        for _ in range(self.batch):
            prompt = torch.randint(0, vocab_size, (self.context,), generator=generator)
            parts = (TextPart(tuple(prompt.tolist())),)
            request = Request(
                f"select-{next(self._names)}", parts, params, select=select, revise=revise
            )
            submitted.append(engine.add(request))
        while min(map(_num_tokens, submitted)) <= _BEFORE:
            engine.step()
        settle(self.device)
        bytes_before, first_count = self._bytes_so_far(submitted), min(map(_num_tokens, submitted))
        start = time.perf_counter()
        while min(map(_num_tokens, submitted)) < self.new_tokens + _BEFORE:
            engine.step()
        settle(self.device)
        seconds = time.perf_counter() - start
        steps = min(map(_num_tokens, submitted)) - first_count
        read = (self._bytes_so_far(submitted) - bytes_before) / steps
        while engine.has_work:
            engine.step()
        width = 1 if revise is None else self._width(revise.window, revise.adaptive)
        self.bytes_read[name] = self._all_bytes(read, select, width)
        return seconds / steps

    def _bytes_so_far(self, submitted: list[RequestProgress]) -> int:
        reports = [progress.output().select for progress in submitted]
        return sum(report.bytes_read for report in reports if report is not None)

    def _all_bytes(self, pages: float, select: Select | None, width: int) -> float:
        """Bytes that a step must read and write.

        They are the weights, ``pages`` with the summaries used to select them, and the states of
        windows of ``width`` rows. Each row writes a state, all but the newest read one, and the
        byte of every candidate page is read and written."""
        model, pool = self._engine.runner.model, self._engine.store.pool
        shape = model.config
        layers = model.weights.layers
        projections = [
            w for layer in layers for w in (layer.qkv, layer.output, layer.gate_up, layer.down)
        ]
        weights = sum(
            projection.weight.nbytes for projection in (*projections, model.weights.lm_head)
        )
        if select is None:
            return weights + pool.bytes_per_page * -(-self.context // pool.page_size) * self.batch
        if width == 1:
            return weights + pages
        selecting_layers = shape.num_layers - len(select.layers_read_densely)
        states = (2 * width - 1) * shape.num_qo_heads * (shape.head_dim + 1) * 4
        registers = 2 * shape.num_kv_heads * (self.context // pool.page_size)
        rewritten = (width - 1) * pool.bytes_per_page / pool.page_size
        return weights + pages + self.batch * (selecting_layers * (states + registers) + rewritten)


def served_name(number: int) -> str:
    """The name of the arm with one choice for ``number`` layers."""
    return f"one choice for {number} layers"


def _num_tokens(progress: RequestProgress) -> int:
    return len(progress.outputs[0].token_ids)


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
