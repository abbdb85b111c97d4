"""Arms that answer with this package's engine: one prompt per item, under any policies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from looseleaf.config import IndexConfig, IndexKind, LayerBudgets, Revise, Select, SelectPolicy
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.index.host.attend import HostedCounters
from looseleaf.llm.llm import LLM
from looseleaf.prompt.request import Document, DocumentContext, Message, Part
from looseleaf.sampling_params import Grammar, SamplingParams
from looseleaf_lab.evals.interview import conversation_grammar
from looseleaf_lab.evals.task import Answer, Item

Form = Literal["chat", "bare"]
"""The checkpoint's chat template, or plain text for completion."""

Report = Callable[[RequestOutput], Mapping[str, float]]

_SINK, _LOCAL = 4, 16


def default_form(llm: LLM) -> Form:
    """``chat`` if the checkpoint has a chat template, else ``bare``."""
    return "chat" if llm.engine.tokenizer.has_chat_template else "bare"


def report_reuse(output: RequestOutput) -> dict[str, float]:
    """The recomputed share of the documents' tokens, if the request has a fuse policy."""
    reuse = output.reuse
    if reuse.fuse is None or not reuse.document_tokens:
        return {}
    return {"documents_recomputed": reuse.document_tokens_recomputed / reuse.document_tokens}


def report_reading(output: RequestOutput) -> dict[str, float]:
    """The share of pages that a select policy read, and the effective KV exposure of revision with
    1 to 7 later rows."""
    report = report_exposure(output)
    if output.select is not None and output.select.pages_held:
        report["pages_read"] = output.select.pages_read / output.select.pages_held
    return report


def report_exposure(output: RequestOutput) -> dict[str, float]:
    """The effective KV exposure of revision, by number of later rows: in pages, or in keys of
    host-resident documents."""
    ratios = output.revision.exposure if output.revision is not None else ()
    return {f"exposure_{later}": ratios[later] for later in range(1, len(ratios))}


def report_prefix(output: RequestOutput) -> dict[str, float]:
    """The share of the prompt that was not in the prefix cache."""
    reuse = output.reuse
    return {"prompt_computed": 1 - reuse.text_tokens_cached / reuse.text_tokens}


def greedy(item: Item) -> SamplingParams:
    """Greedy sampling for an item; in items of several turns, a grammar writes all questions but
    the first."""
    if not item.turns:
        return SamplingParams(temperature=0.0, max_tokens=item.max_tokens)
    return SamplingParams(
        temperature=0.0,
        max_tokens=item.max_tokens,
        ignore_eos=True,
        skip_special_tokens=False,
        grammar=Grammar("lark", conversation_grammar(item.turns)),
    )


class EngineArm:
    """Greedy answers of ``llm``, with documents in the given ``context``.

    The default ``form`` is chat if the checkpoint has a template. ``policies`` are keyword
    arguments of `LLM.chat`, e.g. ``fuse=Fuse("links")``. ``report`` turns an output into figures,
    which become rows after the scores."""

    def __init__(
        self,
        llm: LLM,
        name: str,
        context: DocumentContext,
        *,
        form: Form | None = None,
        report: Report = report_reuse,
        **policies: Any,
    ) -> None:
        self.llm = llm
        self.name = name
        self.context = context
        self.form: Form = form or default_form(llm)
        self.report = report
        self.policies = policies

    def parts(self, item: Item) -> list[Part]:
        """The item as parts of a prompt."""
        documents = [Document(text, context=self.context) for text in item.documents]
        return [*([item.before] if item.before else []), *documents, item.question]

    def answer(self, items: Sequence[Item]) -> list[Answer]:
        """One answer per item, all in one batch."""
        outputs = self.outputs(items, [greedy(item) for item in items])
        return [Answer(output.text, self.report(output)) for output in outputs]

    def outputs(
        self, items: Sequence[Item], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """The engine's output for each item."""
        prompts = [self.parts(item) for item in items]
        if self.form == "bare":
            return self.llm.generate(prompts, params, **self.policies)
        return self.llm.chat([_conversation(parts) for parts in prompts], params, **self.policies)


class PrefixArm(EngineArm):
    """Full attention with a prefix cache that holds the first document of each item.

    An earlier request with only that document and another question fills the cache, so the saving
    is that of documents in a new order."""

    def __init__(self, llm: LLM, form: Form | None = None) -> None:
        super().__init__(llm, "prefix caching", "prompt", form=form, report=report_prefix)

    def outputs(
        self, items: Sequence[Item], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Outputs after the requests that cache the first documents."""
        first_requests = [
            replace(i, documents=i.documents[:1], question="What else?", turns=(), max_tokens=1)
            for i in items
        ]
        # a separate salt, because other arms and tasks cache whole prompts of the same documents
        self.policies = {"salt": f"{self.name} {items[0].fingerprint()}"}
        super().outputs(first_requests, [greedy(item) for item in first_requests])
        return super().outputs(items, params)


class EvictingArm(EngineArm):
    """Greedy answers of ``llm`` under an evicting policy, with documents as text.

    A fractional ``budget`` up to 1.0 is a share of the context in the middle of an output. It
    equals the average number of keys that a selecting policy of that ratio reads."""

    def __init__(
        self, llm: LLM, policy: SelectPolicy, budget: float, *, form: Form | None = None
    ) -> None:
        self.policy, self.budget = policy, budget
        self.is_share = isinstance(budget, float) and budget <= 1
        kind = "ratio" if self.is_share else "tokens"
        super().__init__(llm, f"{policy}, {kind} {budget:g}", "prompt", form=form)

    def outputs(
        self, items: Sequence[Item], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Outputs with the documents' tokens as text, one request at a time, because each has its
        own budget."""
        outputs = []
        for item, item_params in zip(items, params, strict=True):
            tokens = self._tokens(item)
            select = Select(self.policy, tokens=self._budget_tokens(item, len(tokens)))
            outputs += self.llm.generate([[tokens]], item_params, select=select)
        return outputs

    def _tokens(self, item: Item) -> list[int]:
        prompts, parts = self.llm.engine.prompts, self.parts(item)
        if self.form == "bare":
            prompt_parts = prompts.from_parts(parts)
        else:
            prompt_parts = prompts.from_messages(_conversation(parts))
        return [token for part in prompt_parts for token in part.tokens]

    def _budget_tokens(self, item: Item, prompt: int) -> int:
        if not self.is_share:
            return int(self.budget)
        output_text = "\n".join([*item.turns, *item.answers])
        output = len(self.llm.engine.tokenizer.encode(output_text))
        return max(1, round(self.budget * (prompt + output / 2)))


class HostedArm(EngineArm):
    """Greedy answers of ``llm`` with an item's documents as one host-resident collection.

    Prompts have the same tokens as with full attention. The index reads ``budget`` keys per query
    head; a fraction up to 1.0 is a share of the keys, distributed by ``layer_budgets``, and 1.0
    reads every key. ``revise`` also revises past rows.

    The first 4 and the last 16 tokens are always read, because contexts of the reference model are
    short, and at least one more key. Collections stay in host memory, so several arms over one
    engine build them once. Items without documents use full attention."""

    def __init__(
        self,
        llm: LLM,
        budget: float,
        *,
        kind: IndexKind = "graph",
        form: Form | None = None,
        revise: Revise | None = None,
        layer_budgets: LayerBudgets = "flat",
    ) -> None:
        is_share = isinstance(budget, float) and budget <= 1
        keys = f"{100 * budget:g} % of keys" if is_share else f"{budget:g} keys"
        name = "hosted, all keys" if is_share and budget == 1 else f"hosted, {kind}, {keys}"
        ratio, tokens = (budget, None) if is_share else (None, int(budget))
        select = Select("retrieval", tokens, ratio, layer_budgets=layer_budgets)
        policies: dict[str, Any] = {"select": select}
        if layer_budgets != "flat":
            name = f"{name}, {layer_budgets}"
        if revise is not None:
            name, policies = f"{name}, revise {revise.window}", {**policies, "revise": revise}
        super().__init__(llm, name, "lead", form=form, report=report_exposure, **policies)
        self.kind: IndexKind = kind

    def parts(self, item: Item) -> list[Part]:
        """The item's parts with the collection as its one document."""
        return [*([item.before] if item.before else []), self._collection(item), item.question]

    def answer(self, items: Sequence[Item]) -> list[Answer]:
        """One answer per item, with the shares of keys that decoding read and compared."""
        attention = self.llm.engine.runner.attention.hosted
        answers = []
        for item in items:
            if not item.documents:
                (answer,) = EngineArm(self.llm, self.name, self.context, form=self.form).answer(
                    [item]
                )
                answers.append(Answer(answer.text))
                continue
            self.llm.host(
                self._collection(item), index=IndexConfig(self.kind, sink=_SINK, local=_LOCAL)
            )
            assert attention is not None, "hosting a document creates its reader"
            attention.counters = HostedCounters()
            (answer,) = super().answer([item])
            read, scanned = attention.counters.share_read, attention.counters.share_scanned
            answers.append(
                Answer(
                    answer.text,
                    {**answer.report, "keys_read": read or 0.0, "keys_compared": scanned or 0.0},
                )
            )
        return answers

    def _collection(self, item: Item) -> Document:
        return Document(item.documents, context=self.context)


def _conversation(parts: Sequence[Part]) -> list[Message]:
    return [{"role": "user", "content": [*parts]}]
