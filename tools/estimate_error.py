"""The error of cluster attention against dense attention, with and without the estimate.

The estimate covers keys that the index does not return. The error is the relative error of the
output, as a mean over queries, for the layers of `bench index`. Values of synthetic layers are a
function of the key plus noise. ``python tools/estimate_error.py``."""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from looseleaf.config import EngineConfig, IndexConfig
from looseleaf.index import IvfIndex, KeyVectors, attend_estimated, search
from looseleaf.llm.load import load_model, reference_model
from looseleaf.types import AttnState
from looseleaf_lab.bench.index_layers import Capture, synthetic_layer
from looseleaf_lab.evals.world import make_roll_call

NUM_QUERIES, SINK, LOCAL, TOKENS = 100, 4, 16, 4096
CONFIG = IndexConfig("ivf", sink=SINK, local=LOCAL, estimate=True)
Part = tuple[str, Tensor, Tensor, Tensor, float]


class WithValues(Capture):
    """A `Capture` that also stores values."""

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        if layer in self.layers and v is not None:
            self.values = {**getattr(self, "values", {}), layer: v[:, 0].clone()}
        return super().__call__(layer, q, k, v)


def synthetic_layers() -> Iterator[Part]:
    """Name, keys, values, queries and scale of synthetic layers."""
    for kind in ("clustered", "unclustered"):
        layer = synthetic_layer(kind, 65_536, NUM_QUERIES)
        generator = torch.Generator().manual_seed(1)
        mix = torch.randn(128, 128, generator=generator) / 128**0.5
        values = layer.keys @ mix
        values = values + values.std() * torch.randn(values.shape, generator=generator)
        yield kind, layer.keys, values, layer.test_queries, 128**-0.5


def reference_layers() -> Iterator[Part]:
    """As `synthetic_layers`, for the causal reference model; queries are of its last tokens."""
    loaded = load_model(reference_model("causal"), EngineConfig(dtype="float32", device="cpu"))
    texts = make_roll_call(0, 40, 60).documents
    tokens = [token for text in texts for token in loaded.tokenizer.encode_document(text)]
    capture = WithValues(loaded.shape, TOKENS, (0, 3, 7))
    loaded.decoder.forward(torch.tensor(tokens[:TOKENS]), capture)
    for layer in capture.layers:
        q = capture.queries[layer][-NUM_QUERIES * 4 :: 4]
        scale = loaded.shape.head_dim**-0.5
        yield f"reference, layer {layer}", capture.keys[layer], capture.values[layer], q, scale


def ends_of(keys: Tensor) -> Tensor:
    """Positions of the sink and local keys, which are always read."""
    return torch.cat((torch.arange(SINK), torch.arange(len(keys) - LOCAL, len(keys))))


def plain(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> AttnState:
    scores = keys @ query * scale
    return AttnState(scores.softmax(0) @ values, scores.logsumexp(0))


def merged_output(first: AttnState, second: AttnState) -> Tensor:
    lse = torch.logaddexp(first.lse, second.lse)
    return (first.lse - lse).exp() * first.out + (second.lse - lse).exp() * second.out


def main() -> None:
    for name, keys, values, queries, scale in (*synthetic_layers(), *reference_layers()):
        inner, own = keys[SINK : len(keys) - LOCAL], values[SINK : len(keys) - LOCAL].contiguous()
        index = IvfIndex.build(KeyVectors.create(inner), CONFIG)
        index.sum_values(own)
        ends, of_keys = ends_of(keys), KeyVectors(own, len(own))
        for clusters, count in ((1, 8), (16, 20), (16, 100), (64, 100), (64, 400)):
            errors = torch.zeros(2)
            for query in queries:
                dense = plain(query, keys, values, scale).out
                always = plain(query, keys[ends], values[ends], scale)
                result = search(index, query[None], count, clusters)
                hits = result.ids[0], result.scores[0]
                ids = hits[0][hits[0] >= 0].long()
                without = merged_output(always, plain(query, inner[ids], own[ids], scale))
                state = attend_estimated(index, query, hits, of_keys, scale)
                outputs = torch.stack((without, merged_output(always, state)))
                errors += (outputs - dense).norm(dim=1) / dense.norm()
            without_estimate, with_estimate = (errors / len(queries)).tolist()
            sys.stdout.write(
                f"{name}: {clusters} clusters opened, {count} keys found: error "
                f"{without_estimate:.3f} without, {with_estimate:.3f} with the estimate\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
