"""Trains the reference model: a curriculum by mastery, and what may follow it.

    python -m training.train --tokenizer FOLDER --output FOLDER --seconds 300
    python -m training.train --tokenizer FOLDER --output FOLDER --seconds 90 \
        --stages-of block --resume FOLDER

A long run may be done in parts: `--from-share 0.4 --to-share 0.8` is the middle of a schedule.
Writes `model.safetensors` (fp32 split over two bf16 files, see `save`), `training.csv` and
`accuracy.json` to the output folder, and saves the weights every minute. With `--exam N` all tasks
are measured on held-out worlds every minute and a half, N examples each (`exam.csv`).
"""

from __future__ import annotations

import argparse
import csv
import json
import queue
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from training import curriculum
from training.data import KINDS, Stage
from training.evaluate import EvalPlan, Exam, exact_match, table
from training.model import Llama, ModelConfig
from training.step import Averages, DeviceBatch, Stepper, learning_rate
from training.workers import BatchSource


@dataclass(frozen=True)
class TrainConfig:
    """One run of training."""

    tokenizer: Path
    output: Path
    seconds: float = 300.0
    wall: float = 1e9  # seconds from the start of the process, compilation and all, at most
    from_share: float = 0.0  # of the schedule: where this run begins and ends
    to_share: float = 1.0
    max_steps: int = 1_000_000
    peak: float = 1.5e-3
    rows: int = 20
    length: int = 2_048
    num_workers: int = 14
    stages_of: str = "causal"
    first_stage: int = 0
    resume: Path | None = None
    examples: int = 200  # per task, in the evaluation at the end
    exam: int = 0  # per task, in those on the way
    seed: int = 0
    device: str = "cuda"
    model: ModelConfig = field(default_factory=ModelConfig)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return curriculum.CURRICULA[self.stages_of]

    @property
    def tokenizer_file(self) -> str:
        return str(self.tokenizer / "tokenizer.json")


def save(model: Llama, folder: Path) -> None:
    """Weights as bf16, and what bf16 leaves out as a second bf16 file, for resuming."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach().float() for name, p in model.named_parameters()}
    rounded = {name: w.bfloat16() for name, w in weights.items()}
    rest = {name: (weights[name] - rounded[name].float()).bfloat16() for name in weights}
    for file, tensors in (("model", rounded), ("rest", rest)):
        save_file({name: w.cpu() for name, w in tensors.items()}, folder / f"{file}.new")
    for file in ("model", "rest"):  # at once, so that an interrupt leaves a pair
        (folder / f"{file}.new").replace(folder / f"{file}.safetensors")
    (folder / "shape.json").write_text(json.dumps(model.config.describe()) + "\n")


def load(model: Llama, folder: Path) -> None:
    """Weights written by `save` or `export`; the second file may be missing."""
    stored = load_file(folder / "model.safetensors")
    weights = {name.removeprefix("model."): w.float() for name, w in stored.items()}
    if (folder / "rest.safetensors").exists():
        for name, w in load_file(folder / "rest.safetensors").items():
            weights[name] += w.float()
    model.load_state_dict(weights)


class Feed:
    """Batches on the device, moved there by a thread while the model computes."""

    replay_from = 300  # batches of a stage, before one may be used again
    most_kept = 1_000

    def __init__(self, source: BatchSource, device: torch.device) -> None:
        self._source, self._device = source, device
        self._ready: queue.Queue[tuple[int, DeviceBatch]] = queue.Queue(maxsize=3)
        self._stage, self._stopped = 0, False
        self._seen: list[DeviceBatch] = []
        self._seen_stage, self._random, self.num_replayed = 0, random.Random(0), 0
        self._thread = threading.Thread(target=self._fill, daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        while not self._stopped:
            stage = self._stage
            item = (stage, DeviceBatch.of(self._source.next(), self._device))
            while not self._stopped:
                try:
                    self._ready.put(item, timeout=1)
                    break
                except queue.Full:
                    continue

    def advance(self, stage: int) -> None:
        self._source.advance(stage)
        self._stage = stage

    def next(self) -> DeviceBatch:
        """A new batch, or one of this stage seen before if the workers are not as fast."""
        try:
            stage, batch = self._ready.get(block=len(self._seen) < self.replay_from)
        except queue.Empty:
            self.num_replayed += 1
            return self._random.choice(self._seen)
        if stage != self._seen_stage:
            self._seen, self._seen_stage = [], stage
        if len(self._seen) < self.most_kept:
            self._seen.append(batch)
        return batch

    def close(self) -> None:
        self._stopped = True
        self._thread.join()
        self._source.close()


class Clock:
    """What of the time is over, and where in the schedule that is."""

    def __init__(self, config: TrainConfig) -> None:
        self._config, self._born = config, time.time()
        self._started: float | None = None
        self.budget = config.seconds

    def start(self) -> None:
        """Compilation is over; what it took counts towards `wall` only."""
        self._started = time.time()
        self.budget = min(self.budget, self._config.wall - (self._started - self._born))

    @property
    def elapsed(self) -> float:
        return time.time() - self._started if self._started else 0.0

    @property
    def done(self) -> float:
        first, last = self._config.from_share, self._config.to_share
        return first + (last - first) * min(1.0, self.elapsed / self.budget)


def _write_csv(file: Path, rows: list[dict[str, object]]) -> None:
    if not rows:
        return
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


class Trainer:
    """The loop: a step, now and then a look at the averages, perhaps the next stage."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.clock = Clock(config)
        device = torch.device(config.device)
        # the workers fork before anything touches the device
        self.source = BatchSource(
            config.tokenizer_file, config.stages, (config.rows, config.length),
            config.num_workers, seed=config.seed,
        )  # fmt: skip
        shape = (config.rows, config.length)
        self.exam = Exam(config.tokenizer_file, config.exam, shape) if config.exam else None
        torch.manual_seed(config.seed)
        torch.set_float32_matmul_precision("high")
        torch._dynamo.config.recompile_limit = 32  # training and evaluation, first and other layers
        self.model = Llama(config.model).to(device)
        if config.resume is not None:
            load(self.model, config.resume)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.peak, betas=(0.9, 0.95), weight_decay=0.02,
            fused=device.type == "cuda",
        )  # fmt: skip
        self.stepper = Stepper(self.model, config.rows, config.length, device)
        self.averages = Averages(device)
        self.stage = config.first_stage
        while (config.stages[self.stage].until or 1.0) <= config.from_share:
            self.stage += 1
        self.entered = 0
        self.rows: list[dict[str, object]] = []
        self.marks: list[dict[str, object]] = []
        self.tokens = 0
        self.feed = Feed(self.source, device)
        self.feed.advance(self.stage)

    def run(self) -> None:
        config, clock = self.config, self.clock
        print(f"{self.model.num_parameters():,} parameters", flush=True)
        saved = taken = 0.0
        for step in range(config.max_steps):
            loss = self._step(step, clock.done)
            if step == 3:  # compiled by now
                float(loss)
                clock.start()
            if step % 50 == 49 or step == config.max_steps - 1:
                exact = self._log(step, loss)
                self._perhaps_advance(step, exact)
                stuck = config.stages[self.stage].induction and len(config.stages) > 1
                if clock.elapsed >= clock.budget * (0.4 if stuck else 1.0):
                    break
                if clock.elapsed - saved > 60:
                    saved = clock.elapsed
                    self._save()
                if clock.elapsed - taken > 90:
                    taken = clock.elapsed
                    self._take_exam(step)
        self.feed.close()
        self._take_exam(step)
        self._save()

    def _perhaps_advance(self, step: int, exact: dict[str, float]) -> None:
        """On to the next stage if there is one and this one is mastered, or over."""
        stages = self.config.stages
        reached = curriculum.Mastery().reached(stages[self.stage], exact, self.clock.done)
        if reached and step - self.entered >= 100 and self.stage + 1 < len(stages):
            self.stage += 1
            self.entered = step
            self.feed.advance(self.stage)
            self.averages.reset()

    def _take_exam(self, step: int) -> None:
        if self.exam is None:
            return
        marks = self.exam.take(self.stepper)
        self.marks.append({"step": step + 1, "tokens": self.tokens, **marks})
        shown = " ".join(f"{name} {share:.3f}" for name, share in marks.items())
        print(f"exam {step + 1} {self.clock.elapsed:.0f}s: {shown}", flush=True)

    def _save(self) -> None:
        save(self.model, self.config.output)
        _write_csv(self.config.output / "training.csv", self.rows)
        _write_csv(self.config.output / "exam.csv", self.marks)

    def _step(self, step: int, done: float) -> torch.Tensor:
        batch = self.feed.next()
        rate = learning_rate(done, step, self.config.peak)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, exact, total = self.stepper(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.averages.add(exact.detach(), total.detach())
        self.tokens += batch.num_tokens
        return loss.detach()

    def _log(self, step: int, loss: torch.Tensor) -> dict[str, float]:
        exact, elapsed = self.averages.read(), self.clock.elapsed
        stage = self.config.stages[self.stage].name
        row: dict[str, object] = {
            "step": step + 1, "tokens": self.tokens, "stage": stage,
            "seconds": round(elapsed, 1), "loss": round(float(loss), 4),
        }  # fmt: skip
        row |= {kind: round(exact[kind], 4) if kind in exact else "" for kind in KINDS}
        self.rows.append(row)
        shown = " ".join(f"{kind} {value:.3f}" for kind, value in exact.items())
        if step % 250 == 249:
            spent = f"{step + 1} {elapsed:.0f}s {self.tokens / 1e6:.0f}M"
            replayed = f"replayed {self.feed.num_replayed}"
            print(f"{spent} {stage} loss {float(loss):.4f} {replayed} {shown}", flush=True)
        return exact

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Held-out accuracy of the weights as they are shipped, rounded to bf16."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.bfloat16().float())
        tokenizer = Tokenizer.from_file(self.config.tokenizer_file)
        shape = (self.config.rows, self.config.length)
        results = {}
        for independent in (False, True):
            for chat in (True, False):
                plan = EvalPlan(self.config.examples, chat=chat, independent=independent)
                name = f"{'independent' if independent else 'full'} {'chat' if chat else 'bare'}"
                results[name] = exact_match(self.stepper, tokenizer, plan, shape)
        text = json.dumps(results, indent=2) + "\n"
        (self.config.output / "accuracy.json").write_text(text)
        print(table(results), flush=True)
        return results


def parse() -> TrainConfig:
    default = TrainConfig(Path(), Path())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="folder that an earlier run wrote")
    parser.add_argument("--stages-of", choices=sorted(curriculum.CURRICULA), default="causal")
    parser.add_argument("--examples", type=int, default=200, help="per task; 0: no evaluation")
    parser.add_argument("--exam", type=int, default=0, help="per task; 0: none on the way")
    for name in ("seconds", "wall", "from-share", "to-share", "peak"):
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=float, default=value)
    for name in ("rows", "length", "seed", "first-stage", "num-workers", "max-steps"):
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--theta", type=float, default=default.model.rope_theta)
    parser.add_argument("--positions", type=int, default=default.model.max_positions)
    parser.add_argument("--device", default="cuda")
    given = vars(parser.parse_args())
    model = ModelConfig(rope_theta=given.pop("theta"), max_positions=given.pop("positions"))
    return TrainConfig(**given, model=model)


def main() -> None:
    trainer = Trainer(parse())
    trainer.run()
    if trainer.config.examples:
        trainer.evaluate()


if __name__ == "__main__":
    main()
