"""Where a chain of documents can be seen, layer by layer: rows for docs/blend.md.

A chain hands a value on from document to document. In each world the tokens that carry it are
known, so it can be asked which of them an answer needs (*restored*), and how many tokens one must
choose to catch them all by the true deviation of keys and values or by the question's attention, at
each layer. Dense attention in fp32, one world at a time (tests/blend/dense.py).

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
    """A sentence that hands a value on: tokens of the prompt, by what they spell."""

    sentence: list[int]
    before: list[int]
    own: list[int]
    stays: list[int]


@dataclass(frozen=True)
class Row:
    """Of ``worlds``: a share of right answers with its 95 % interval (``right``), or a median with
    the middle 80 % (all others)."""

    model: str
    hops: str
    study: str
    case: str
    worlds: int
    value: float
    low: float
    high: float


Found = list[tuple[str, str, float]]
"""A study, its case, and one world's value."""


class World:
    """One chain question over stored documents, and its links, the last one first."""

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
        # the first document was encoded where it stands: nothing of it can be chosen
        self.free = self.blend.candidates.documents > 1
        self.links = list(self._links())

    def _links(self) -> Iterator[Link]:
        told = re.fullmatch(r"The (\w+) of (.+) is (.+)\.", self.example.answer)
        assert told, self.example.answer
        kind, own = told[1], told[2]
        for _ in range(self.example.hops):
            pattern = SENTENCE.format(kind=kind, own=re.escape(own))
            found = [(n, re.search(pattern, t)) for n, t in enumerate(self.example.documents)]
            ((number, match),) = [(n, m) for n, m in found if m]
            start = match.start("stays") - len(own) - 1
            spans = (match.span(), match.span("before"), (start, start + len(own)))
            yield Link(*(self._places(number, *span) for span in (*spans, match.span("stays"))))
            own = match["before"]

    def _places(self, number: int, start: int, stop: int) -> list[int]:
        """Candidates whose text lies between two characters of a document."""
        text, places, at = self.example.documents[number], [], 0
        tokens, inner = self.blend.prompt.documents[number], self.tokenizer.encode(text)
        skipped = next(n for n in range(len(tokens)) if tokens[n : n + len(inner)] == inner)
        first = sum(map(len, self.blend.prompt.documents[:number])) + skipped
        for place, token in enumerate(inner):
            end = at + len(self.tokenizer.token_bytes(token))
            # a token begins with the space before its word
            if start < end <= stop and at >= start - 1:
                places.append(first + place)
            at = end
        return places

    def right(self, places: Sequence[int]) -> bool:
        """Whether greedy decoding gives the answer with these candidates computed again."""
        chosen = torch.tensor(sorted(set(places)), dtype=torch.long)
        hidden, _ = self.blend.run(self.blend.rows(chosen))
        tail = hidden[-len(self.answer) :]
        return bool(self.model.logits(tail).argmax(-1).tolist() == self.answer)

    def share(self, scores: Tensor, places: Sequence[int]) -> float:
        """The share of the tokens with the highest scores that holds all these places."""
        scores = scores.masked_fill(~self.free, -torch.inf)
        least = scores[torch.tensor(places)].min()
        return float((scores >= least).sum() / self.free.sum())

    def restored(self) -> Found:
        """Which tokens of each link an answer needs, and how many they are."""
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
        found: Found = []
        for case, places in cases.items():
            found.append(("right", case, float(self.right(places))))
            found.append(("tokens", case, len(set(places)) / len(self.free)))
        return found

    def deviation(self) -> Found:
        """What must be chosen to catch the whole chain, by the true deviation at each layer; how
        large it is, what the first 15 % are, and how far two neighbouring layers agree."""
        blend, at = self.blend, self.blend.candidates.positions
        _, done = blend.run(blend.rows(torch.arange(len(at))))
        chain = [p for link in self.links for p in link.stays]
        kinds = {name: mask[self.free] for name, mask in self.kinds().items()}
        found: Found = [(f"all: {name}", "", float(mask.mean())) for name, mask in kinds.items()]
        total, free = torch.zeros(len(at)), torch.zeros(0)
        for layer, (keys, values) in enumerate(zip(blend.keys, blend.values, strict=True)):
            fresh = done.fresh[layer]
            scores = kv_deviation(fresh[0][: len(at)], fresh[1][: len(at)], keys[at], values[at])
            total += scores
            case, free, before = str(layer), scores[self.free], free
            kept = free.topk(int(0.15 * len(free))).indices
            found += [
                ("deviation", case, self.share(scores, chain)),
                ("deviation of the chain", case, float(scores[chain].median())),
                ("deviation of all", case, float(free.median())),
                *((f"first 15 %: {k}", case, float(m[kept].mean())) for k, m in kinds.items()),
            ]
            if layer > 1:
                found.append(("correlation with the layer before", case, spearman(free, before)))
        return [*found, ("deviation", "all layers", self.share(total, chain))]

    def kinds(self) -> dict[str, Tensor]:
        """1 for the first 16 tokens of each document; 1 for tokens that, with the one before
        them, stand in an earlier document as well."""
        begins, repeats, seen = [], [], set()
        for tokens in self.blend.prompt.documents:
            pairs = list(zip([-1, *tokens], tokens, strict=False))
            begins += [float(place < _SEAM) for place in range(len(tokens))]
            repeats += [float(pair in seen) for pair in pairs]
            seen.update(pairs)
        return {"begins a document": torch.tensor(begins), "repeats": torch.tensor(repeats)}

    def question(self) -> Found:
        """The same by the question's attention over stored documents, also for the chain's end
        alone, and the weight of that read."""
        blend = self.blend
        _, done = blend.run(blend.text_rows[: self.num_text])
        layers = self.model.config.num_layers
        by_layer = [blend.received(done, range(n, n + 1)) for n in range(layers)]
        stacked = torch.stack(by_layer)
        watch = Question(Budget(ratio=0.1))
        last = [n for n in range(layers) if watch.watches(n, layers)]
        cases = {str(n): scores for n, scores in enumerate(by_layer)}
        cases["last quarter"] = stacked[last].amax(0)
        cases["maximum of all"], cases["mean of all"] = stacked.amax(0), stacked.mean(0)
        end, chain = self.links[0].stays, [p for link in self.links for p in link.stays]
        found: Found = []
        for case, scores in cases.items():
            found.append(("question, whole chain", case, self.share(scores, chain)))
            found.append(("question, its end", case, self.share(scores, end)))
            found.append(("question, weight at its end", case, float(scores[end].max())))
        return found

    def link(self) -> Found:
        """How strongly each link, computed again, reads the one before it, at each layer."""
        blend, found = self.blend, []
        for later, earlier in zip(self.links, self.links[1:], strict=False):
            _, done = blend.run(blend.candidates.positions[torch.tensor(later.stays)])
            for layer in range(self.model.config.num_layers):
                received = blend.received(done, range(layer, layer + 1))
                found.append(("link", str(layer), float(received[earlier.stays].max())))
        return found


def spearman(a: Tensor, b: Tensor) -> float:
    """The correlation of two rankings."""
    ranks = torch.stack([x.argsort().argsort().float() for x in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def study(task: tuple[Path, int, int]) -> tuple[int, Found]:
    """All studies of one world."""
    folder, hops, seed = task
    torch.set_num_threads(1)
    config = read_config(folder)
    model = Decoder(config, load_weights(folder, config, torch.float32))
    with torch.inference_mode():
        world = World(model, Tokenizer(folder), make_example("chain", seed, hops=hops))
        return hops, world.restored() + world.deviation() + world.question() + world.link()


def summarize(name: str, results: Sequence[tuple[int, Found]]) -> list[Row]:
    """A row a case, for each number of hops and for all together."""
    values: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for count, found in results:
        for kind, case, value in found:
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
