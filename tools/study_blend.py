"""A study of chains of documents, layer by layer: rows for docs/blend.md.

A chain passes a value from document to document, by known tokens. The study recomputes subsets of
these tokens and checks the answer (*restored*). It also ranks all tokens at each layer, by the true
deviation of keys and values or by the question's attention. The result is the share of tokens that
contains the chain. Attention is dense and in fp32 (tests/blend/dense.py).

PYTHONPATH=src:. python tools/study_blend.py --worlds 60 --output results/blend_study.csv"""

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from looseleaf.blend import Budget, Question, kv_deviation
from looseleaf.llm.load import reference_model
from looseleaf.models import Decoder, Tokenizer, load_weights, read_config
from looseleaf_lab.bench.origin import describe_origin
from looseleaf_lab.bench.results import append_rows
from looseleaf_lab.evals.intervals import interval
from looseleaf_lab.evals.world import Example, make_example
from tests.blend.dense import DenseBlend, Prompt

HOPS = (1, 2, 3)
_SEAM = 16
SENTENCE = (
    r"(?:Like that of|As in|Taken from) (?P<before>[^,]+), the {kind} of {own} (?P<stays>stays)"
)


@dataclass(frozen=True)
class Link:
    """A sentence that passes a value on: candidates of the sentence and of its parts."""

    sentence: list[int]
    before: list[int]
    own: list[int]
    stays: list[int]


@dataclass(frozen=True)
class Row:
    """A value over ``worlds`` with bounds.

    Study ``right`` has a share with its 95 % interval, others a median with the middle 80 %."""

    model: str
    hops: str
    study: str
    case: str
    worlds: int
    value: float
    low: float
    high: float


Values = list[tuple[str, str, float]]
"""Study, case and value of a world."""


class World:
    """A chain question over stored documents, and its links, the last link first."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, example: Example) -> None:
        self.model, self.tokenizer, self.example = model, tokenizer, example
        content: list[object] = [{"type": "document"} for _ in example.documents]
        content.append({"type": "text", "text": example.question})
        runs = tokenizer.encode_chat([{"role": "user", "content": content}])
        self.answer = [*tokenizer.encode(example.answer), min(tokenizer.eos_token_ids)]
        documents = [tokenizer.encode_document(text) for text in example.documents]
        self.num_text = len(runs[-1])
        text = [*runs[-1], *self.answer[:-1]]
        self.blend = DenseBlend(model, Prompt(list(runs[0]), documents, text))
        # the first document is exact: its tokens need no recomputation
        self.free = self.blend.candidates.documents > 1
        self.links = list(self._links())

    def _links(self) -> Iterator[Link]:
        answer = re.fullmatch(r"The (\w+) of (.+) is (.+)\.", self.example.answer)
        assert answer, self.example.answer
        kind, own = answer[1], answer[2]
        for _ in range(self.example.hops):
            pattern = SENTENCE.format(kind=kind, own=re.escape(own))
            matches = [(n, re.search(pattern, t)) for n, t in enumerate(self.example.documents)]
            ((number, match),) = [(n, m) for n, m in matches if m]
            start = match.start("stays") - len(own) - 1
            spans = (match.span(), match.span("before"), (start, start + len(own)))
            yield Link(*(self._candidates(number, *s) for s in (*spans, match.span("stays"))))
            own = match["before"]

    def _candidates(self, number: int, start: int, stop: int) -> list[int]:
        """Candidates whose text is between two characters of a document."""
        text, candidates, offset = self.example.documents[number], [], 0
        tokens, inner = self.blend.prompt.documents[number], self.tokenizer.encode(text)
        skipped = next(n for n in range(len(tokens)) if tokens[n : n + len(inner)] == inner)
        first = sum(map(len, self.blend.prompt.documents[:number])) + skipped
        for index, token in enumerate(inner):
            end = offset + len(self.tokenizer.token_bytes(token))
            # a token begins with the space before its word
            if start < end <= stop and offset >= start - 1:
                candidates.append(first + index)
            offset = end
        return candidates

    def is_right(self, candidates: Sequence[int]) -> bool:
        """Whether greedy decoding gives the answer if ``candidates`` are recomputed."""
        indices = torch.tensor(sorted(set(candidates)), dtype=torch.long)
        hidden, _ = self.blend.run(self.blend.rows(indices))
        tail = hidden[-len(self.answer) :]
        return bool(self.model.logits(tail).argmax(-1).tolist() == self.answer)

    def share(self, scores: Tensor, candidates: Sequence[int]) -> float:
        """The smallest share of tokens, by highest score, that contains all ``candidates``."""
        scores = scores.masked_fill(~self.free, -torch.inf)
        least = scores[torch.tensor(candidates)].min()
        return float((scores >= least).sum() / self.free.sum())

    def restored(self) -> Values:
        """Right answers by recomputed parts of each link, and the share of these tokens."""
        links, everything = self.links, torch.arange(len(self.free)).tolist()
        cases = {
            "nothing": [],
            "the whole sentence": [p for link in links for p in link.sentence],
            "the name it refers to": [p for link in links for p in link.before],
            "its own name": [p for link in links for p in link.own],
            "both names": [p for link in links for p in (*link.before, *link.own)],
            "the one word": [p for link in links for p in link.stays],
            "the sentence without it": [
                p for link in links for p in link.sentence if p not in link.stays
            ],
            "everything": everything,
        }
        results: Values = []
        for case, candidates in cases.items():
            results.append(("right", case, float(self.is_right(candidates))))
            results.append(("tokens", case, len(set(candidates)) / len(self.free)))
        return results

    def deviation(self) -> Values:
        """The share of tokens that contains the chain, by the true deviation at each layer.

        Also the deviation's size, the kinds of the first 15 % of tokens, and the correlation of
        neighbouring layers."""
        blend, positions = self.blend, self.blend.candidates.positions
        count = len(positions)
        _, trace = blend.run(blend.rows(torch.arange(count)))
        chain = [p for link in self.links for p in link.stays]
        kinds = {name: mask[self.free] for name, mask in self.kinds().items()}
        results: Values = [(f"all: {name}", "", float(mask.mean())) for name, mask in kinds.items()]
        total, free = torch.zeros(count), torch.zeros(0)
        for layer, (keys, values) in enumerate(zip(blend.keys, blend.values, strict=True)):
            fresh_keys, fresh_values = (fresh[:count] for fresh in trace.fresh[layer])
            scores = kv_deviation(fresh_keys, fresh_values, keys[positions], values[positions])
            total += scores
            case, free, before = str(layer), scores[self.free], free
            top = free.topk(int(0.15 * len(free))).indices
            results += [
                ("deviation", case, self.share(scores, chain)),
                ("deviation of the chain", case, float(scores[chain].median())),
                ("deviation of all", case, float(free.median())),
                *((f"first 15 %: {k}", case, float(m[top].mean())) for k, m in kinds.items()),
            ]
            if layer > 1:
                results.append(("correlation with the layer before", case, spearman(free, before)))
        return [*results, ("deviation", "all layers", self.share(total, chain))]

    def kinds(self) -> dict[str, Tensor]:
        """Masks of the first 16 tokens of documents, and of bigrams from an earlier document."""
        begins, repeats, seen = [], [], set()
        for tokens in self.blend.prompt.documents:
            pairs = list(zip([-1, *tokens], tokens, strict=False))
            begins += [float(index < _SEAM) for index in range(len(tokens))]
            repeats += [float(pair in seen) for pair in pairs]
            seen.update(pairs)
        return {"begins a document": torch.tensor(begins), "repeats": torch.tensor(repeats)}

    def question(self) -> Values:
        """The share of tokens that contains the chain, or its end, by the question's attention.

        Also the attention weight of the chain's end."""
        blend = self.blend
        _, trace = blend.run(blend.text_rows[: self.num_text])
        layers = self.model.config.num_layers
        by_layer = [blend.received(trace, range(n, n + 1)) for n in range(layers)]
        stacked = torch.stack(by_layer)
        watch = Question(Budget(ratio=0.1))
        last = [n for n in range(layers) if watch.watches(n, layers)]
        cases = {str(n): scores for n, scores in enumerate(by_layer)}
        cases["last quarter"] = stacked[last].amax(0)
        cases["maximum of all"], cases["mean of all"] = stacked.amax(0), stacked.mean(0)
        end, chain = self.links[0].stays, [p for link in self.links for p in link.stays]
        results: Values = []
        for case, scores in cases.items():
            results.append(("question, whole chain", case, self.share(scores, chain)))
            results.append(("question, its end", case, self.share(scores, end)))
            results.append(("question, weight at its end", case, float(scores[end].max())))
        return results

    def link(self) -> Values:
        """The attention weight of each link, recomputed, to the link before it, at each layer."""
        blend, results = self.blend, []
        for later, earlier in zip(self.links, self.links[1:], strict=False):
            _, trace = blend.run(blend.candidates.positions[torch.tensor(later.stays)])
            for layer in range(self.model.config.num_layers):
                received = blend.received(trace, range(layer, layer + 1))
                results.append(("link", str(layer), float(received[earlier.stays].max())))
        return results


def spearman(a: Tensor, b: Tensor) -> float:
    """The rank correlation of two tensors."""
    ranks = torch.stack([x.argsort().argsort().float() for x in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def study(task: tuple[Path, int, int]) -> tuple[int, Values]:
    """The number of hops and the values of a world, for a folder, hops and a seed."""
    folder, hops, seed = task
    torch.set_num_threads(1)
    config = read_config(folder)
    model = Decoder(config, load_weights(folder, config, torch.float32))
    with torch.inference_mode():
        world = World(model, Tokenizer(folder), make_example("chain", seed, hops=hops))
        return hops, world.restored() + world.deviation() + world.question() + world.link()


def summarize(name: str, results: Sequence[tuple[int, Values]]) -> list[Row]:
    """A row per study and case, for each number of hops and for all together."""
    values: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for count, world_values in results:
        for kind, case, value in world_values:
            values[kind, case, str(count)].append(value)
            values[kind, case, "all"].append(value)
    rows = []
    for (kind, case, hops), own in values.items():
        if kind == "right":
            value, (low, high) = sum(own) / len(own), interval(own)
        else:
            points = torch.tensor([0.5, 0.1, 0.9])
            value, low, high = torch.tensor(own).quantile(points).tolist()
        rows.append(Row(name, hops, kind, case, len(own), value, low, high))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, help="checkpoint folder [default: causal]")
    parser.add_argument("--worlds", type=int, default=60, help="worlds of each number of hops")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(options.model or reference_model("causal"))
    tasks = [(folder, hops, seed) for seed in range(options.worlds) for hops in HOPS]
    with get_context("spawn").Pool(options.processes) as pool:
        results = pool.map(study, tasks, chunksize=4)
    rows = summarize("causal" if options.model is None else folder.name, results)
    append_rows(options.output, [asdict(row) for row in rows], describe_origin())


if __name__ == "__main__":
    main()
