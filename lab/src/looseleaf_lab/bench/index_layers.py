"""Keys and queries for benchmarks of indexes: from the reference model, or synthetic.

A synthetic layer has 128 dims and one set of queries for the four query heads of a KV head of an 8B
model. As RetrievalAttention found, queries are far from the keys, because both have means of their
own. The distance is three times that of keys in the metric of the keys' covariance; the paper
reports more than ten. Queries match keys by the inner product in a latent of 32 dims. In layer
``clustered`` the latent is one of 1,024 topics of unequal popularity (Zipf) plus noise; in
``unclustered`` it is normal."""

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
    """Keys ``[keys, head_dim]``, build queries and separate test queries, in one frame."""

    name: str
    keys: Tensor
    queries: Tensor
    test_queries: Tensor

    @property
    def mismatch(self) -> float:
        """Mean Mahalanobis distance of queries to the keys' mean, relative to that of keys."""
        mean = self.keys.mean(0)
        covariance = torch.cov(self.keys.T) + 1e-4 * torch.eye(self.keys.shape[1])
        metric = torch.linalg.cholesky(torch.linalg.inv(covariance))

        def distance(vectors: Tensor) -> Tensor:
            mean_distance: Tensor = torch.linalg.vector_norm(
                (vectors - mean) @ metric, dim=1
            ).mean()
            return mean_distance

        return float(
            distance(self.test_queries) / distance(self.keys[:: max(1, len(self.keys) // 4096)])
        )


def synthetic_layer(kind: str, num_keys: int, num_test: int, seed: int = 0) -> Layer:
    """A synthetic layer, ``clustered`` or ``unclustered``.

    Raises InvalidOption for another kind."""
    if kind not in ("clustered", "unclustered"):
        raise InvalidOption(f"unknown layer {kind!r}: use clustered or unclustered")
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    dim, num_queries = 128, num_keys // 4 + num_test
    topics = normal(_TOPICS, _LATENT)
    popularity = 1 / torch.arange(1, _TOPICS + 1)

    def latent(count: int) -> Tensor:
        if kind == "unclustered":
            return normal(count, _LATENT)
        topic = torch.multinomial(popularity, count, replacement=True, generator=generator)
        return topics[topic] + 0.5 * normal(count, _LATENT)

    key_latent, query_latent = latent(num_keys), latent(num_queries)
    rotation = torch.linalg.qr(normal(dim, dim))[0]
    keys = key_latent @ rotation[:_LATENT] + 0.3 * normal(num_keys, dim) + 4 * rotation[-1]
    queries = query_latent @ rotation[:_LATENT] + 0.3 * normal(num_queries, dim)
    queries = queries + 6 * rotation[-2] - 3 * rotation[-1]
    return Layer(kind, keys, queries[num_test:], queries[:num_test])


def reference_layers(
    texts: Sequence[str], num_tokens: int, layers: tuple[int, ...], num_test: int, seed: int = 0
) -> Iterator[Layer]:
    """The first KV head of layers of the causal reference model, from a pass over ``texts``.

    The queries of all heads that share it are split at random into build and test queries. The
    first 16 and the last 64 keys are left out. Raises InvalidOption if the model or the texts have
    fewer than ``num_tokens`` tokens."""
    loaded = load_model(reference_model("causal"), EngineConfig(dtype="float32", device="cpu"))
    if num_tokens > loaded.max_model_len:
        raise InvalidOption(
            f"{num_tokens} tokens exceed the model's limit of {loaded.max_model_len}"
        )
    tokens = [token for text in texts for token in loaded.tokenizer.encode_document(text)]
    if len(tokens) < num_tokens:
        raise InvalidOption(
            f"the texts have {len(tokens)} tokens, fewer than {num_tokens}: add texts"
        )
    capture = Capture(loaded.shape, num_tokens, layers)
    loaded.decoder.forward(torch.tensor(tokens[:num_tokens]), capture)
    for layer in layers:
        k, q = capture.keys[layer], capture.queries[layer]
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(q), generator=generator)
        yield Layer(
            f"reference, layer {layer}", k[16:-64], q[order[num_test:]], q[order[:num_test]]
        )


class Capture:
    """Dense causal attention of one sequence that records queries and keys of the first KV head."""

    def __init__(self, shape: ModelConfig, num_tokens: int, layers: tuple[int, ...]) -> None:
        self.shape = shape
        self.layers = layers
        self.rotations = layer_rotations(shape, num_tokens)
        self.keys: dict[int, Float[Tensor, "tokens head_dim"]] = {}
        self.queries: dict[int, Float[Tensor, "queries head_dim"]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        assert k is not None and v is not None, "every layer stores keys and values"
        positions = torch.arange(len(q))
        rotated_q, rotated_k = (rotate(x, positions, self.rotations[layer]) for x in (q, k))
        if layer in self.layers:
            group = q.shape[1] // k.shape[1]
            self.keys[layer] = rotated_k[:, 0].clone()
            self.queries[layer] = rotated_q[:, :group].reshape(-1, q.shape[2]).clone()
        heads = [x.transpose(0, 1)[None] for x in (rotated_q, rotated_k, v)]
        scale = softmax_scale(self.shape, layer)
        out = torch.nn.functional.scaled_dot_product_attention(
            heads[0], heads[1], heads[2], is_causal=True, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1).contiguous()
