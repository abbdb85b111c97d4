"""One optimisation step and one measurement, on batches moved to a device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from training.data import FAINT, FULL, KINDS, MAX_ANSWERS, Batch
from training.model import FlexMasks, Llama, Rope, dense_mask

FAINT_WEIGHT = 0.02  # of tokens that are read, not answered


@dataclass(frozen=True)
class DeviceBatch:
    """A batch on the device, and how many of its places are not padding."""

    tokens: Tensor
    labels: Tensor
    weight: Tensor
    sample: Tensor
    part: Tensor
    answer: Tensor
    kinds: Tensor
    num_tokens: int

    @staticmethod
    def of(batch: Batch, device: torch.device) -> DeviceBatch:
        def move(array: object, dtype: torch.dtype) -> Tensor:
            tensor = torch.as_tensor(array)
            if device.type == "cuda":
                tensor = tensor.pin_memory()
            return tensor.to(device, non_blocking=True).to(dtype)

        return DeviceBatch(
            move(batch.tokens, torch.int64), move(batch.labels, torch.int64),
            move(batch.weight, torch.int32), move(batch.sample, torch.int32),
            move(batch.part, torch.int32), move(batch.answer, torch.int64),
            move(batch.kinds, torch.int64), batch.num_tokens,
        )  # fmt: skip


def loss_and_counts(
    states: Tensor, embedding: Tensor, batch: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted loss; per kind, how many answers have every token right, and how many there are."""
    labels, weight, answer, kinds = batch
    logits = functional.linear(states, embedding).float()
    token_loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    share = (weight == FULL).float() + FAINT_WEIGHT * (weight == FAINT).float()
    loss = (token_loss * share.flatten()).sum() / share.sum().clamp_min(1.0)
    wrong = ((logits.argmax(-1) != labels) & (weight == FULL)).flatten()
    missed = torch.zeros(MAX_ANSWERS, device=states.device).scatter_add_(
        0, answer.flatten(), wrong.float()
    )
    of_kind = functional.one_hot(kinds + 1, len(KINDS) + 1)[:, 1:].float()
    exact = ((missed == 0).float()[:, None] * of_kind).sum(0)
    return loss, exact, of_kind.sum(0)


class Stepper:
    """The model with all that a forward over packed rows needs on this device."""

    def __init__(self, model: Llama, rows: int, length: int, device: torch.device) -> None:
        self.model, self.device = model, device
        self.rope = Rope.at(torch.arange(length, device=device), model.config)
        self._masks: FlexMasks | None = None
        self._head = loss_and_counts
        if device.type == "cuda":
            self._masks = FlexMasks(rows, length, device)
            self._head = torch.compile(loss_and_counts)
            for layer in model.layers:
                layer.compile()

    def _mask(self, batch: DeviceBatch) -> BlockMask | Tensor:
        if self._masks is not None:
            return self._masks(batch.sample, batch.part)
        return dense_mask(batch.sample, batch.part)

    def __call__(self, batch: DeviceBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and counts."""
        on_gpu = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu):
            states = self.model(batch.tokens, self.rope, self._mask(batch))
            return self._head(
                states,
                self.model.embed_tokens.weight,
                (batch.labels, batch.weight, batch.answer, batch.kinds),
            )


class Averages:
    """Moving averages of exact match per kind, kept on the device until they are read."""

    def __init__(self, device: torch.device, decay: float = 0.95) -> None:
        self._decay = decay
        self._exact = torch.zeros(len(KINDS), device=device)
        self._total = torch.zeros(len(KINDS), device=device)

    def add(self, exact: Tensor, total: Tensor) -> None:
        self._exact.mul_(self._decay).add_(exact)
        self._total.mul_(self._decay).add_(total)

    def reset(self) -> None:
        self._exact.zero_()
        self._total.zero_()

    def read(self) -> dict[str, float]:
        exact, total = self._exact.tolist(), self._total.tolist()
        return {k: e / t for k, e, t in zip(KINDS, exact, total, strict=True) if t > 0.5}


_WARM_UP_STEPS = 100


def learning_rate(done: float, step: int, peak: float) -> float:
    """Cosine over the share of the budget that is used, after a short warm-up by steps."""
    floor = 0.02
    cosine = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return peak * cosine * min(1.0, (step + 1) / _WARM_UP_STEPS)
