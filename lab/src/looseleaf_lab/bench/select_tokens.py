"""A whole token under a select policy: an engine with random weights over random keys.

Prompts are not computed: their pages hold random numbers, which cost a step what true keys cost.
A row and the row before it want other pages then, so revised rows read more than those of a true
model do."""

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
from looseleaf_lab.bench.random_model import MODEL_SHAPES, random_engine

_SEED_TOKENS = 1_000
# steps in which the widest window fills up and graphs are captured
_BEFORE = 12


class _Skipping(Runner):
    """A runner that computes nothing while prompts are to be computed."""

    def run(self, work: StepWork, previous: Tensor | None = None) -> StepResult:
        """Random logits in the place of those of a step with a prompt."""
        if not work.chunks:
            return super().run(work, previous)
        wanted = len(work.decode) + sum(chunk.ends_prompt for chunk in work.chunks)
        size = wanted, self.model.config.vocab_size
        return StepResult.of_chunks(torch.randn(*size, device=self.model.device))


@dataclass(eq=False)
class TokenArms:
    """Seconds a step of ``batch`` outputs behind ``context`` tokens each; ``bytes_read`` of every
    arm that has run, by its name."""

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
        every = SchedulerConfig(
            max_num_seqs=max(64, self.batch),
            max_num_batched_tokens=max(2048, self.context * self.batch),
        )
        config = EngineConfig(
            device=str(self.device), max_model_len=self.context + outputs, cache=cache,
            scheduler=every,
        )  # fmt: skip
        self._engine: Engine = random_engine(self.shape, config, self.device)
        self._engine.runner = _Skipping(**vars(self._engine.runner))
        self._engine.store.pool.kv.normal_()
        self._names = count()

    def dense(self) -> float:
        """An arm that reads everything."""
        return self._timed("dense", None, None)

    def revising(self, window: int, *, adaptive: bool = False) -> Callable[[], float]:
        """An arm that chooses, with windows of so many rows."""
        name = self.name_of(window, adaptive=adaptive)
        revise = Revise(window, adaptive=adaptive)
        return lambda: self._timed(name, self.policy, revise)

    def left_to_the_engine(self) -> float:
        """An arm whose context is read whole as long as the engine finds that faster."""
        return self._timed("left alone", replace(self.policy, dense_below=None), None)

    def name_of(self, window: int, *, adaptive: bool = False) -> str:
        """What the arm is called: of an adaptive window also how much of it is left."""
        if adaptive:
            return f"w<={window} is {self._width(window, adaptive)}"
        return "select" if window == 1 else f"w={window}"

    def _width(self, window: int, adaptive: bool) -> int:
        if not adaptive:
            return window
        free = free_rows(self.device, self._engine.runner.model.dtype.itemsize)
        return window_for(window, self.batch, free)

    def _timed(self, name: str, select: Select | None, revise: Revise | None) -> float:
        engine, params = self._engine, SamplingParams(
            max_tokens=self.new_tokens + _BEFORE + 1, temperature=0.0, ignore_eos=True
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        most = min(MODEL_SHAPES[self.shape].vocab_size, _SEED_TOKENS)
        added = []
        for _ in range(self.batch):
            prompt = torch.randint(0, most, (self.context,), generator=generator)
            parts = (TextPart(tuple(prompt.tolist())),)
            request = Request(
                f"select-{next(self._names)}", parts, params, select=select, revise=revise
            )
            added.append(engine.add(request))
        while min(map(_num_tokens, added)) <= _BEFORE:
            engine.step()
        settle(self.device)
        before, done = self._bytes_so_far(added), min(map(_num_tokens, added))
        begun = time.perf_counter()
        while min(map(_num_tokens, added)) < self.new_tokens + _BEFORE:
            engine.step()
        settle(self.device)
        seconds = time.perf_counter() - begun
        steps = min(map(_num_tokens, added)) - done
        read = (self._bytes_so_far(added) - before) / steps
        while engine.has_work:
            engine.step()
        width = 1 if revise is None else self._width(revise.window, revise.adaptive)
        self.bytes_read[name] = self._all_bytes(read, select, width)
        return seconds / steps

    def _bytes_so_far(self, added: list[RequestProgress]) -> int:
        reports = [progress.output().select for progress in added]
        return sum(report.bytes_read for report in reports if report is not None)

    def _all_bytes(self, pages: float, select: Select | None, width: int) -> float:
        """What a step must bring from memory: weights, ``pages`` with what was looked at to choose
        them, and what windows of ``width`` rows keep: a state is written for each row and read for
        all but the newest, and the byte of every candidate is read and written."""
        model, pool = self._engine.runner.model, self._engine.store.pool
        shape = model.config
        layers = model.weights.layers
        matrices = [w for one in layers for w in (one.qkv, one.output, one.gate_up, one.down)]
        weights = sum(projection.weight.nbytes for projection in (*matrices, model.weights.lm_head))
        if select is None:
            return weights + pool.bytes_per_page * -(-self.context // pool.page_size) * self.batch
        if width == 1:
            return weights + pages
        choosing = shape.num_layers - len(select.layers_read_densely)
        states = (2 * width - 1) * shape.num_qo_heads * (shape.head_dim + 1) * 4
        registers = 2 * shape.num_kv_heads * (self.context // pool.page_size)
        rewritten = (width - 1) * pool.bytes_per_page / pool.page_size
        return weights + pages + self.batch * (choosing * (states + registers) + rewritten)


def _num_tokens(progress: RequestProgress) -> int:
    return len(progress.outputs[0].token_ids)


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
