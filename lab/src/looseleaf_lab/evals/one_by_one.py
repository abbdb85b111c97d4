"""Arms with one call per document, as in chains of calls: MapReduce and MapRerank.

No prompt has several documents, so both arms reuse each document as stored. Neither relates
documents to each other."""

from collections.abc import Sequence

from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.errors import InvalidOption
from looseleaf.llm.llm import LLM
from looseleaf.sampling_params import SamplingParams
from looseleaf_lab.evals.arms import EngineArm, Form
from looseleaf_lab.evals.task import Answer, Item
from looseleaf_lab.evals.world import NO_ANSWER


class PerDocumentArm:
    """The common part of both arms: one prompt with the item's question per document."""

    def __init__(self, llm: LLM, form: Form | None = None) -> None:
        self.llm = llm
        self._arm = EngineArm(llm, "one document", "lead", form=form)

    def answers_by_document(self, items: Sequence[Item]) -> list[list[RequestOutput]]:
        """Per item, one output per document with log-probabilities; for an item without documents,
        one output for the bare question. Raises InvalidOption for items of several turns."""
        if any(item.turns for item in items):
            raise InvalidOption(
                "an interview is one output over all documents: leave out map-reduce and map-rerank"
            )
        singles = [
            Item(item.key, documents, item.question, item.answers, item.max_tokens, item.before)
            for item in items
            for documents in _single_documents(item)
        ]
        outputs = iter(self._generate(singles))
        return [[next(outputs) for _ in _single_documents(item)] for item in items]

    def _generate(self, items: Sequence[Item]) -> list[RequestOutput]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=item.max_tokens, logprobs=0)
            for item in items
        ]
        prompts = [self._arm.parts(item) for item in items]
        if self._arm.form == "bare":
            return self.llm.generate(prompts, params)
        return self.llm.chat([[{"role": "user", "content": parts}] for parts in prompts], params)


class MapReduceArm(PerDocumentArm):
    """An answer per document, then one answer from these answers.

    Answers that decline are dropped, unless all do."""

    name = "map-reduce"

    def answer(self, items: Sequence[Item]) -> list[Answer]:
        reductions = []
        for item, outputs in zip(items, self.answers_by_document(items), strict=True):
            texts = [output.text.strip() for output in outputs]
            useful = [text for text in texts if text and not declines(text)] or texts[:1]
            notes = ("\n".join(dict.fromkeys(useful)),) if any(useful) else ()
            reductions.append(
                Item(item.key, notes, item.question, item.answers, item.max_tokens, item.before)
            )
        return [Answer(output.text) for output in self._generate(reductions)]


class MapRerankArm(PerDocumentArm):
    """The answer, out of one per document, with the highest mean log-probability of its tokens.

    Answers that decline rank last at any probability."""

    name = "map-rerank"

    def answer(self, items: Sequence[Item]) -> list[Answer]:
        return [Answer(max(outputs, key=_rank).text) for outputs in self.answers_by_document(items)]


def declines(text: str) -> bool:
    """Whether an answer says that the documents have none, in the generated world's words."""
    return NO_ANSWER in text


def _single_documents(item: Item) -> list[tuple[str, ...]]:
    """Each document in a tuple of its own; one empty tuple if there is none."""
    no_documents: tuple[str, ...] = ()
    return [(text,) for text in item.documents] or [no_documents]


def _rank(output: RequestOutput) -> tuple[bool, float]:
    completion = output.outputs[0]
    mean = (completion.cumulative_logprob or 0.0) / max(1, len(completion.token_ids))
    return not declines(completion.text), mean
