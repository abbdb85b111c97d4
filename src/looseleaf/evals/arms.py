"""Arms that answer with this package's engine: one prompt an item, under any policies."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from looseleaf.engine.llm import LLM
from looseleaf.engine.outputs import RequestOutput
from looseleaf.engine.request import Document, DocumentContext, Part
from looseleaf.evals.task import Answer, Item
from looseleaf.sampling_params import SamplingParams

Form = Literal["chat", "bare"]
"""By the checkpoint's chat template, or as plain text that the model goes on with."""

Report = Callable[[RequestOutput], Mapping[str, float]]


def report_reuse(output: RequestOutput) -> dict[str, float]:
    """The share of the documents' tokens that the request computed again in their place."""
    reuse = output.reuse
    if reuse.fuse is None or not reuse.document_tokens:
        return {}
    return {"documents_recomputed": reuse.document_tokens_recomputed / reuse.document_tokens}


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
        has_template = llm.engine.tokenizer.has_chat_template
        self.form: Form = form or ("chat" if has_template else "bare")
        self.report = report
        self.policies = policies

    def parts(self, item: Item) -> list[Part]:
        """The item as parts of a prompt."""
        documents = [Document(text, context=self.context) for text in item.documents]
        return [*([item.before] if item.before else []), *documents, item.question]

    def answer(self, items: Sequence[Item]) -> list[Answer]:
        """One answer for each item, all in one batch."""
        params = [SamplingParams(temperature=0.0, max_tokens=item.max_tokens) for item in items]
        prompts = [self.parts(item) for item in items]
        if self.form == "chat":
            conversations = [[{"role": "user", "content": parts}] for parts in prompts]
            outputs = self.llm.chat(conversations, params, **self.policies)
        else:
            outputs = self.llm.generate(prompts, params, **self.policies)
        return [Answer(output.text, self.report(output)) for output in outputs]
