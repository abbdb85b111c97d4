"""Arms that read documents one at a time, as chains of calls do: MapReduce and MapRerank.

Neither needs one context for all documents, so both reuse each document as it is stored; neither
sees what documents say of each other."""

from collections.abc import Sequence

from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.errors import InvalidOption
from looseleaf.llm.llm import LLM
from looseleaf.sampling_params import SamplingParams
from looseleaf_lab.evals.arms import EngineArm, Form
from looseleaf_lab.evals.task import Answer, Item
from looseleaf_lab.evals.world import NO_ANSWER


class OneByOne:
    """What both arms share: every document of an item is asked the item's question by itself."""

    def __init__(self, llm: LLM, form: Form | None = None) -> None:
        self.llm = llm
        self._one = EngineArm(llm, "one document", "lead", form=form)

    def ask_each(self, items: Sequence[Item]) -> list[list[RequestOutput]]:
        """For each item one answer a document, with log-probabilities; of an item without
        documents, one to the bare question. Raises InvalidOption for items of several turns."""
        if any(item.turns for item in items):
            raise InvalidOption(
                "an interview is one output over all documents: leave out map-reduce and map-rerank"
            )
        singles = [
            Item(item.key, documents, item.question, item.answers, item.max_tokens, item.before)
            for item in items
            for documents in _alone(item)
        ]
        found = iter(self._ask(singles))
        return [[next(found) for _ in _alone(item)] for item in items]

    def _ask(self, items: Sequence[Item]) -> list[RequestOutput]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=item.max_tokens, logprobs=0)
            for item in items
        ]
        prompts = [self._one.parts(item) for item in items]
        if self._one.form == "bare":
            return self.llm.generate(prompts, params)
        return self.llm.chat([[{"role": "user", "content": parts}] for parts in prompts], params)


class MapReduceArm(OneByOne):
    """Answers from each document alone, then one answer from those answers.

    Those that decline are left out, unless all do."""

    name = "map-reduce"

    def answer(self, items: Sequence[Item]) -> list[Answer]:
        reduced = []
        for item, outputs in zip(items, self.ask_each(items), strict=True):
            said = [output.text.strip() for output in outputs]
            known = [text for text in said if text and not declines(text)] or said[:1]
            notes = ("\n".join(dict.fromkeys(known)),) if any(known) else ()
            reduced.append(
                Item(item.key, notes, item.question, item.answers, item.max_tokens, item.before)
            )
        return [Answer(output.text) for output in self._ask(reduced)]


class MapRerankArm(OneByOne):
    """Of the answers from each document alone the one whose tokens are likeliest on average.

    Those that decline come last, however sure the model is of them."""

    name = "map-rerank"

    def answer(self, items: Sequence[Item]) -> list[Answer]:
        return [Answer(max(outputs, key=_rank).text) for outputs in self.ask_each(items)]


def declines(text: str) -> bool:
    """Whether an answer says that there is none, in the words of the generated world."""
    return NO_ANSWER in text


def _alone(item: Item) -> list[tuple[str, ...]]:
    """Each document by itself; none at all, if there is none."""
    none: tuple[str, ...] = ()
    return [(text,) for text in item.documents] or [none]


def _rank(output: RequestOutput) -> tuple[bool, float]:
    one = output.outputs[0]
    mean = (one.cumulative_logprob or 0.0) / max(1, len(one.token_ids))
    return not declines(one.text), mean
