"""Trains the reference model: a curriculum by mastery, and what may follow it.

    python -m training.train --tokenizer FOLDER --output FOLDER --seconds 300
    python -m training.train --tokenizer FOLDER --output FOLDER --seconds 90 \
        --stages-of block --resume FOLDER

Writes `model.safetensors` (fp32 split over two bf16 files, see `save`), `training.csv` and
`accuracy.json` to the output folder, and saves the weights every minute.
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
from training.evaluate import EvalPlan, exact_match, table
from training.model import Llama, ModelConfig
from training.step import Averages, DeviceBatch, Stepper, learning_rate
from training.workers import BatchSource


@dataclass(frozen=True)
class TrainConfig:
    """One run of training."""

    tokenizer: Path
    output: Path
    seconds: float = 300.0
    max_steps: int = 1_000_000
    peak: float = 1.5e-3
    rows: int = 20
    length: int = 2_048
    num_workers: int = 14
    stages_of: str = "causal"
    first_stage: int = 0
    resume: Path | None = None
    examples: int = 200  # per task, in the evaluation at the end
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
    save_file({name: w.cpu() for name, w in rounded.items()}, folder / "model.safetensors")
    save_file({name: w.cpu() for name, w in rest.items()}, folder / "rest.safetensors")


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
        self._seen.append(batch)
        return batch

    def close(self) -> None:
        self._stopped = True
        self._thread.join()
        self._source.close()


class Trainer:
    """The loop: a step, now and then a look at the averages, perhaps the next stage."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        device = torch.device(config.device)
        # the workers fork before anything touches the device
        self.source = BatchSource(
            config.tokenizer_file, config.stages, (config.rows, config.length),
            config.num_workers, seed=config.seed,
        )  # fmt: skip
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
        self.rows: list[dict[str, object]] = []
        self.tokens = 0
        self.feed = Feed(self.source, device)
        self.feed.advance(self.stage)

    def run(self) -> None:
        print(f"{self.model.num_parameters():,} parameters", flush=True)
        start, saved, entered = 0.0, 0.0, 0
        for step in range(self.config.max_steps):
            loss = self._step(step, (time.time() - start) / self.config.seconds if start else 0.0)
            if step == 3:  # compiled by now: the clock of the budget starts here
                start = saved = time.time()
            if step % 50 == 49 or step == self.config.max_steps - 1:
                elapsed = time.time() - start if start else 0.0
                exact = self._log(step, loss, elapsed)
                mastered = curriculum.Mastery().reached(self.config.stages[self.stage], exact)
                if mastered and step - entered >= 100 and self.stage + 1 < len(self.config.stages):
                    self.stage += 1
                    entered = step
                    self.feed.advance(self.stage)
                    self.averages.reset()
                stuck = self.stage == 0 < len(self.config.stages) - 1
                if elapsed >= self.config.seconds * (0.4 if stuck else 1.0):
                    break
                if time.time() - saved > 60:
                    saved = time.time()
                    save(self.model, self.config.output)
        self.feed.close()
        save(self.model, self.config.output)
        self._write_log()

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

    def _log(self, step: int, loss: torch.Tensor, elapsed: float) -> dict[str, float]:
        exact = self.averages.read()
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

    def _write_log(self) -> None:
        with (self.config.output / "training.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(self.rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="folder that an earlier run wrote")
    parser.add_argument("--stages-of", choices=sorted(curriculum.CURRICULA), default="causal")
    parser.add_argument("--examples", type=int, default=200, help="per task; 0: no evaluation")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--peak", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first-stage", type=int, default=0)
    parser.add_argument("--num-workers", type=int, default=14)
    parser.add_argument("--device", default="cuda")
    return TrainConfig(**vars(parser.parse_args()))


def main() -> None:
    trainer = Trainer(parse())
    trainer.run()
    if trainer.config.examples:
        trainer.evaluate()


if __name__ == "__main__":
    main()
