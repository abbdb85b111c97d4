"""A stream of batches, made by worker processes so that the GPU never waits for text."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.sharedctypes import Synchronized
from queue import Empty, Full
from typing import Any

from tokenizers import Tokenizer

from training.data import Batch, Sample, SampleWriter, Stage, draw_sample, pack
from training.long import draw_long

EARLIER_SHARE = 0.15  # of batches drawn from the stage before, so that it is not forgotten


def sample_stream(writer: SampleWriter, start: int, step: int, stage: Stage) -> Iterator[Sample]:
    """Samples of the seeds start, start + step, start + 2 step, ...; the long ones come first."""
    for number, seed in enumerate(itertools.count(start, step)):
        draw = draw_long if number < stage.long_samples else draw_sample
        yield draw(writer, seed, stage)


class BatchSource:
    """Batches of the current stage of a curriculum. Close it when done."""

    def __init__(
        self,
        tokenizer_file: str,
        stages: tuple[Stage, ...],
        shape: tuple[int, int],
        num_workers: int,
        seed: int = 0,
    ) -> None:
        self._tokenizer_file, self._stages, self._shape = tokenizer_file, stages, shape
        self._seed = seed
        context = multiprocessing.get_context("fork")
        self._stage: Synchronized[int] = context.Value("i", 0)
        self._processes: list[Any] = []
        self._local: Iterator[tuple[int, Batch]] | None = None
        if num_workers == 0:
            self._local = self._batches(0, 1)
            return
        self._queue: Any = context.Queue(maxsize=2 * num_workers)
        for worker in range(num_workers):
            process = context.Process(target=self._work, args=(worker, num_workers), daemon=True)
            process.start()
            self._processes.append(process)

    def _batches(self, worker: int, num_workers: int) -> Iterator[tuple[int, Batch]]:
        writer = SampleWriter(Tokenizer.from_file(self._tokenizer_file))
        for number in itertools.count():
            current = self._stage.value
            earlier = number % round(1 / EARLIER_SHARE) == 3 and current > 1
            stage = self._stages[current - 1 if earlier else current]
            # every batch gets seeds of its own: 2**16 for each of 2**20 batches
            start = ((self._seed << 20) + number * num_workers + worker) << 16
            yield current, pack(sample_stream(writer, start, 1, stage), *self._shape)

    def _work(self, worker: int, num_workers: int) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        parent = os.getppid()
        for item in self._batches(worker, num_workers):
            while os.getppid() == parent:
                try:
                    self._queue.put(item, timeout=5)
                    break
                except Full:
                    continue
            else:
                return

    def advance(self, stage: int) -> None:
        self._stage.value = stage

    def next(self) -> Batch:
        """The next batch; those made for an earlier stage are passed over."""
        while True:
            stage, batch = next(self._local) if self._local else self._wait()
            if stage == self._stage.value:
                return batch

    def _wait(self) -> tuple[int, Batch]:
        """What a worker made. Raises RuntimeError if one has failed and the others are late."""
        while True:
            try:
                item: tuple[int, Batch] = self._queue.get(timeout=5)
                return item
            except Empty:
                if not all(process.is_alive() for process in self._processes):
                    raise RuntimeError("a data worker failed: see its traceback") from None

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
