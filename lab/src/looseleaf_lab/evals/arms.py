"""Arms that answer with this package's engine: one prompt an item, under any policies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from looseleaf.attention.host.attend import HostedCounters
from looseleaf.config import IndexConfig, IndexKind, LayerBudgets, Revise, Select, SelectPolicy
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.llm.llm import LLM
from looseleaf.prompt.request import Document, DocumentContext, Message, Part
from looseleaf.sampling_params import Grammar, SamplingParams
from looseleaf_lab.evals.interview import conversation_grammar
from looseleaf_lab.evals.task import Answer, Item

Form = Literal["chat", "bare"]
"""By the checkpoint's chat template, or as plain text that the model goes on with."""

Report = Callable[[RequestOutput], Mapping[str, float]]

_SINK, _LOCAL = 4, 16


def default_form(llm: LLM) -> Form:
    """Chat where the checkpoint has a template."""
    return "chat" if llm.engine.tokenizer.has_chat_template else "bare"


def report_reuse(output: RequestOutput) -> dict[str, float]:
    """The share of the documents' tokens that the request computed again in their place."""
    reuse = output.reuse
    if reuse.fuse is None or not reuse.document_tokens:
        return {}
    return {"documents_recomputed": reuse.document_tokens_recomputed / reuse.document_tokens}


def report_reading(output: RequestOutput) -> dict[str, float]:
    """The share of the pages that the rows of the answer read, under a select policy, and how
    much revision added to it: the effective KV exposure with 1 to 7 later rows."""
    report = report_exposure(output)
    if output.select is not None and output.select.pages_held:
        report["pages_read"] = output.select.pages_read / output.select.pages_held
    return report


def report_exposure(output: RequestOutput) -> dict[str, float]:
    """How much revision added to what rows read, by the number of later rows; of hosted documents
    keys."""
    ratios = output.revision.exposure if output.revision is not None else ()
    return {f"exposure_{later}": ratios[later] for later in range(1, len(ratios))}


def report_prefix(output: RequestOutput) -> dict[str, float]:
    """The share of the prompt that no prefix cache held."""
    reuse = output.reuse
    return {"prompt_computed": 1 - reuse.text_tokens_cached / reuse.text_tokens}


def greedy(item: Item) -> SamplingParams:
    """How an item is answered; where it has more than one turn, by a grammar that writes all
    questions but the first."""
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
    """Greedy answers of ``llm``, documents in the given ``context``.

    ``form`` is chat where the checkpoint has a template, unless it is given. ``policies`` are
    keyword arguments of `LLM.chat`, e.g. ``fuse=Fuse("links")``. ``report`` turns an output into
    figures, which become rows beside the scores."""

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
        """One answer for each item, all in one batch."""
        outputs = self.outputs(items, [greedy(item) for item in items])
        return [Answer(output.text, self.report(output)) for output in outputs]

    def outputs(
        self, items: Sequence[Item], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """What the engine says to each item."""
        prompts = [self.parts(item) for item in items]
        if self.form == "bare":
            return self.llm.generate(prompts, params, **self.policies)
        return self.llm.chat([_conversation(parts) for parts in prompts], params, **self.policies)


class PrefixArm(EngineArm):
    """Greedy answers of ``llm`` with full attention, where another question behind the first
    document alone was asked before: what a prefix cache saves of documents in ever new order."""

    def __init__(self, llm: LLM, form: Form | None = None) -> None:
        super().__init__(llm, "prefix caching", "prompt", form=form, report=report_prefix)

    def outputs(
        self, items: Sequence[Item], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """As of any `EngineArm`, after the prompts that leave their first document behind."""
        before = [
            replace(i, documents=i.documents[:1], question="What else?", turns=(), max_tokens=1)
            for i in items
        ]
        # a salt of its own: prompts of other arms and tasks have the same documents, and would be
        # found whole
        self.policies = {"salt": f"{self.name} {items[0].fingerprint()}"}
        super().outputs(before, [greedy(item) for item in before])
        return super().outputs(items, params)


class EvictingArm(EngineArm):
    """Greedy answers of ``llm`` under a policy that throws keys away, which reads the same prompt
    as text.

    A ``budget`` that is a fraction up to 1.0 is a share of the context in the middle of an output:
    as many keys are kept as a policy that chooses pages by that ratio reads on average."""

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
        """As of any `EngineArm`, with the documents' tokens as text; one after the other, since
        each has its own budget."""
        outputs = []
        for item, one in zip(items, params, strict=True):
            tokens = self._tokens(item)
            select = Select(self.policy, tokens=self._kept(item, len(tokens)))
            outputs += self.llm.generate([[tokens]], one, select=select)
        return outputs

    def _tokens(self, item: Item) -> list[int]:
        prompts, parts = self.llm.engine.prompts, self.parts(item)
        if self.form == "bare":
            made = prompts.from_parts(parts)
        else:
            made = prompts.from_messages(_conversation(parts))
        return [token for part in made for token in part.tokens]

    def _kept(self, item: Item, prompt: int) -> int:
        if not self.is_share:
            return int(self.budget)
        said = "\n".join([*item.turns, *item.answers])
        output = len(self.llm.engine.tokenizer.encode(said))
        return max(1, round(self.budget * (prompt + output / 2)))


class HostedArm(EngineArm):
    """Greedy answers of ``llm`` with an item's documents hosted as one collection, the same tokens
    as with full attention, and read by its index: ``budget`` keys for each query head, a fraction
    up to 1.0 that share of them, spread over layers as ``layer_budgets`` say. With 1.0 every key is
    read. With ``revise`` past rows read on.

    Its first 4 and last 16 tokens are always read, since contexts of the reference model are short,
    and one at least is found besides. What was hosted stays, so that several arms over one engine
    host it once. An item without documents is answered by full attention."""

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
        """The item with one document, the collection."""
        return [*([item.before] if item.before else []), self._collection(item), item.question]

    def answer(self, items: Sequence[Item]) -> list[Answer]:
        """One answer for each item, with the shares of keys that decoding read and compared."""
        hosted = self.llm.engine.runner.attention.hosted
        answers = []
        for item in items:
            if not item.documents:
                (alone,) = EngineArm(self.llm, self.name, self.context, form=self.form).answer(
                    [item]
                )
                answers.append(Answer(alone.text))
                continue
            self.llm.host(
                self._collection(item), index=IndexConfig(self.kind, sink=_SINK, local=_LOCAL)
            )
            assert hosted is not None, "what is hosted can be read"
            hosted.counters = HostedCounters()
            (answer,) = super().answer([item])
            read, scanned = hosted.counters.share_read, hosted.counters.share_scanned
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
