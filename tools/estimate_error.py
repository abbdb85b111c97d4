"""How far attention by clusters is from dense attention, with the estimate of what was not found
and without: relative error of the output, mean over queries, for the layers of `bench index`.

Values of made layers are a function of their key's topic and as much noise; those of the reference
model are its own, behind 4,096 tokens of a generated world. ``python tools/estimate_error.py``."""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from looseleaf.config import EngineConfig, IndexConfig
from looseleaf.index import IvfIndex, KeyVectors, attend_estimated, search
from looseleaf.llm.load import load_model, reference_model
from looseleaf.types import AttnState
from looseleaf_lab.bench.index_layers import Capture, made_layer
from looseleaf_lab.evals.world import make_roll_call

ASKED, SINK, LOCAL, TOKENS = 100, 4, 16, 4096
CONFIG = IndexConfig("ivf", sink=SINK, local=LOCAL, estimate=True)
Part = tuple[str, Tensor, Tensor, Tensor, float]


class WithValues(Capture):
    """A `Capture` that keeps values too."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self.layers:
            self.values = {**getattr(self, "values", {}), layer: v[:, 0].clone()}
        return super().__call__(layer, q, k, v)


def made() -> Iterator[Part]:
    """Name, keys, values, queries and scale of made layers."""
    for kind in ("clustered", "unclustered"):
        layer = made_layer(kind, 65_536, ASKED)
        generator = torch.Generator().manual_seed(1)
        mix = torch.randn(128, 128, generator=generator) / 128**0.5
        values = layer.keys @ mix
        values = values + values.std() * torch.randn(values.shape, generator=generator)
        yield kind, layer.keys, values, layer.asked, 128**-0.5


def reference() -> Iterator[Part]:
    """The same of the causal reference model; its last tokens ask."""
    loaded = load_model(reference_model("causal"), EngineConfig(dtype="float32", device="cpu"))
    texts = make_roll_call(0, 40, 60).documents
    tokens = [token for text in texts for token in loaded.tokenizer.encode_document(text)]
    capture = WithValues(loaded.shape, TOKENS, (0, 3, 7))
    loaded.decoder.forward(torch.tensor(tokens[:TOKENS]), capture)
    for layer in capture.layers:
        q = capture.queries[layer][-ASKED * 4 :: 4]
        scale = loaded.shape.head_dim**-0.5
        yield f"reference, layer {layer}", capture.keys[layer], capture.values[layer], q, scale


def ends_of(keys: Tensor) -> Tensor:
    """The keys that are always read."""
    return torch.cat((torch.arange(SINK), torch.arange(len(keys) - LOCAL, len(keys))))


def plain(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> AttnState:
    scores = keys @ query * scale
    return AttnState(scores.softmax(0) @ values, scores.logsumexp(0))


def joined(one: AttnState, other: AttnState) -> Tensor:
    lse = torch.logaddexp(one.lse, other.lse)
    return (one.lse - lse).exp() * one.out + (other.lse - lse).exp() * other.out


def main() -> None:
    for name, keys, values, queries, scale in (*made(), *reference()):
        inner, own = keys[SINK : len(keys) - LOCAL], values[SINK : len(keys) - LOCAL].contiguous()
        index = IvfIndex.build(KeyVectors.create(inner), CONFIG)
        index.sum_values(own)
        ends, of_keys = ends_of(keys), KeyVectors(own, len(own))
        for clusters, count in ((1, 8), (16, 20), (16, 100), (64, 100), (64, 400)):
            errors = torch.zeros(2)
            for query in queries:
                whole = plain(query, keys, values, scale).out
                always = plain(query, keys[ends], values[ends], scale)
                hits = search(index, query[None], count, clusters)
                found = hits.ids[0], hits.scores[0]
                ids = found[0][found[0] >= 0].long()
                without = joined(always, plain(query, inner[ids], own[ids], scale))
                state = attend_estimated(index, query, found, of_keys, scale)
                both = torch.stack((without, joined(always, state)))
                errors += (both - whole).norm(dim=1) / whole.norm()
            few, more = (errors / len(queries)).tolist()
            sys.stdout.write(
                f"{name}: {clusters} clusters opened, {count} keys found: "
                f"error {few:.3f} without, {more:.3f} with the estimate\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
