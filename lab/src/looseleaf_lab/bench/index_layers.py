"""Keys and queries to measure indexes on: dumped from the reference model, or made to a shape.

A made layer has 128 dims, the four query heads of a KV head of an 8B model in one set of queries,
and what RetrievalAttention saw there, if less of it: queries stand far from the keys, three times
as far as keys do in the metric of the keys' covariance (the paper: more than ten times), since both
have means of their own. Of a latent of 32 dims that says what a key is about, queries ask by the
inner product. In layer ``clustered`` it is one of 1,024 topics of unequal popularity (Zipf) plus
noise; in ``unclustered`` it is normal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.config import EngineConfig, ModelConfig
from looseleaf.errors import InvalidOption
from looseleaf.llm.load import load_model, reference_model
from looseleaf.ops.rotate import rotate
from looseleaf.rope import layer_rotations, softmax_scale

_LATENT = 32
_TOPICS = 1024


@dataclass(frozen=True)
class Layer:
    """Keys ``[keys, head_dim]``, queries to build from and others to ask with, in one frame."""

    name: str
    keys: Tensor
    queries: Tensor
    asked: Tensor

    @property
    def mismatch(self) -> float:
        """How many times farther from the keys' mean queries are than keys are, by Mahalanobis."""
        mean = self.keys.mean(0)
        covariance = torch.cov(self.keys.T) + 1e-4 * torch.eye(self.keys.shape[1])
        metric = torch.linalg.cholesky(torch.linalg.inv(covariance))

        def distance(vectors: Tensor) -> Tensor:
            away: Tensor = torch.linalg.vector_norm((vectors - mean) @ metric, dim=1).mean()
            return away

        return float(distance(self.asked) / distance(self.keys[:: max(1, len(self.keys) // 4096)]))


def made_layer(kind: str, num_keys: int, asked: int, seed: int = 0) -> Layer:
    """A layer ``clustered`` or ``unclustered``, as the head of this file says.

    Raises InvalidOption for another kind."""
    if kind not in ("clustered", "unclustered"):
        raise InvalidOption(f"unknown layer {kind!r}: use clustered or unclustered")
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    dim, num_queries = 128, num_keys // 4 + asked
    topics = normal(_TOPICS, _LATENT)
    popularity = 1 / torch.arange(1, _TOPICS + 1)

    def latent(count: int) -> Tensor:
        if kind == "unclustered":
            return normal(count, _LATENT)
        drawn = torch.multinomial(popularity, count, replacement=True, generator=generator)
        return topics[drawn] + 0.5 * normal(count, _LATENT)

    key_latent, query_latent = latent(num_keys), latent(num_queries)
    turn = torch.linalg.qr(normal(dim, dim))[0]
    keys = key_latent @ turn[:_LATENT] + 0.3 * normal(num_keys, dim) + 4 * turn[-1]
    queries = query_latent @ turn[:_LATENT] + 0.3 * normal(num_queries, dim)
    queries = queries + 6 * turn[-2] - 3 * turn[-1]
    return Layer(kind, keys, queries[asked:], queries[:asked])


def reference_layers(
    texts: Sequence[str], num_tokens: int, layers: tuple[int, ...], asked: int, seed: int = 0
) -> Iterator[Layer]:
    """Layers of the causal reference model that reads ``texts``, the first KV head of each.

    Queries of all heads that share it, drawn at random into those to build from and those to ask
    with; the first 16 and the last 64 keys are left out. Raises InvalidOption if the model reads no
    ``num_tokens`` tokens, or the texts have fewer."""
    loaded = load_model(reference_model("causal"), EngineConfig(dtype="float32", device="cpu"))
    if num_tokens > loaded.max_model_len:
        raise InvalidOption(
            f"{num_tokens} tokens are more than the {loaded.max_model_len} that the model reads"
        )
    tokens = [token for text in texts for token in loaded.tokenizer.encode_document(text)]
    if len(tokens) < num_tokens:
        raise InvalidOption(f"the texts have {len(tokens)} tokens, not {num_tokens}: give more")
    capture = Capture(loaded.shape, num_tokens, layers)
    loaded.decoder.forward(torch.tensor(tokens[:num_tokens]), capture)
    for layer in layers:
        k, q = capture.keys[layer], capture.queries[layer]
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(q), generator=generator)
        yield Layer(f"reference, layer {layer}", k[16:-64], q[order[asked:]], q[order[:asked]])


class Capture:
    """Dense causal attention of one sequence that keeps what was compared, of the first KV head."""

    def __init__(self, shape: ModelConfig, num_tokens: int, layers: tuple[int, ...]) -> None:
        self.shape = shape
        self.layers = layers
        self.rotations = layer_rotations(shape, num_tokens)
        self.keys: dict[int, Float[Tensor, "tokens head_dim"]] = {}
        self.queries: dict[int, Float[Tensor, "queries head_dim"]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(len(q))
        turned_q, turned_k = (rotate(x, positions, self.rotations[layer]) for x in (q, k))
        if layer in self.layers:
            group = q.shape[1] // k.shape[1]
            self.keys[layer] = turned_k[:, 0].clone()
            self.queries[layer] = turned_q[:, :group].reshape(-1, q.shape[2]).clone()
        heads = [x.transpose(0, 1)[None] for x in (turned_q, turned_k, v)]
        scale = softmax_scale(self.shape, layer)
        out = torch.nn.functional.scaled_dot_product_attention(
            heads[0], heads[1], heads[2], is_causal=True, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1).contiguous()
