"""The models that `tools.fuzz` asks: a tiny one in fp32 on a CPU, or on a GPU one of 16 bits whose
heads the kernels of the device serve, beside the same numbers in fp32 on a CPU."""

import random
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looseleaf.config import ModelConfig, RopeConfig
from looseleaf.models import Decoder
from looseleaf.models.layers import DecoderWeights
from looseleaf.models.linear import Projection, pack, unpack
from looseleaf_lab.bench.model_shapes import MODEL_SHAPES
from looseleaf_lab.bench.random_model import random_weights
from tools.fuzz_drawing import VOCAB

# query heads, KV heads, dims of a head: groups of 1 to 8, and heads that Triton's kernels serve
_HEADS = ((8, 2, 64), (6, 2, 128), (7, 1, 128), (4, 4, 128), (8, 1, 64), (4, 2, 256), (4, 2, 80))
# by how much more than fp32 answers of 16 bits may move
_SLACK = {torch.float32: 1.0, torch.float16: 10.0, torch.bfloat16: 70.0}


class Tested(NamedTuple):
    """The model of the engines that are tested, and that of the engine which is asked one thing;
    ``slack`` is how many times the rounding of fp32 their answers may differ by."""

    name: str
    model: ModelConfig
    decoder: Decoder
    alone: Decoder
    slack: float

    @property
    def device(self) -> torch.device:
        """Where the engines that are tested compute."""
        return self.decoder.device


def tiny_model() -> Tested:
    """The model of a CPU."""
    model = _shape(4, 2, 16)
    decoder = Decoder(model, random_weights(model, torch.float32, torch.device("cpu")))
    return Tested("tiny", model, decoder, decoder, _SLACK[torch.float32])


def gpu_model(seed: int, device: torch.device) -> Tested:
    """A model of a GPU, drawn by ``seed``."""
    draw = random.Random(seed)
    heads, dtype = draw.choice(_HEADS), draw.choice((torch.float16, torch.bfloat16))
    model = _shape(*heads)
    drawn = random_weights(model, torch.float32, torch.device("cpu"))
    decoder = Decoder(model, _mapped(drawn, lambda tensor: tensor.to(device, dtype)))
    alone = Decoder(model, _mapped(drawn, lambda tensor: tensor.to(dtype).float()))
    name = f"{heads[0]} query and {heads[1]} KV heads of {heads[2]}, {dtype}"
    return Tested(name, model, decoder, alone, _SLACK[dtype])


def _shape(num_qo_heads: int, num_kv_heads: int, head_dim: int) -> ModelConfig:
    rope = RopeConfig(head_dim=head_dim, rotary_dim=head_dim)
    # of three layers two turn alike, so that what they share is told from what a layer has
    ropes = rope, replace(rope, law="none"), rope
    heads: dict[str, Any] = {"num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads}
    shape = replace(MODEL_SHAPES["tiny"], num_layers=3, vocab_size=VOCAB, head_dim=head_dim)
    return replace(shape, rope=rope, layer_ropes=ropes, **heads)


def _mapped(weights: DecoderWeights, to: Any) -> DecoderWeights:
    """``weights`` with every tensor brought ``to`` somewhere, and packed there if that is done."""

    def mapped(value: Any) -> Any:
        if isinstance(value, Tensor):
            return to(value)
        if isinstance(value, Projection):
            weight, bias = value
            return pack(Projection(to(unpack(weight)), None if bias is None else to(bias)))
        if isinstance(value, tuple):
            parts = [mapped(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: mapped(getattr(value, f.name)) for f in fields(value)})
        return value

    made: DecoderWeights = mapped(weights)
    return made
