"""Many questions answered one after another in one long output, so that errors can add up.

The reference model was trained on conversations, not on long answers. So the conversation is one
output: a grammar writes the questions, and the model every word of the answers. What it made of
earlier questions and answers is never computed again, as it would be if each were a request."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from looseleaf.config import Select, SelectPolicy
from looseleaf.engine.llm import LLM
from looseleaf.engine.outputs import RequestOutput
from looseleaf.engine.request import Document, Message
from looseleaf.evals.arms import EngineArm
from looseleaf.evals.task import Answer, Item
from looseleaf.evals.world import WorldConfig, make_world
from looseleaf.evals.world.tasks import Question, ask
from looseleaf.sampling_params import Grammar, SamplingParams

USER, ASSISTANT = "<|user|>", "<|assistant|>"
# an answer and a question take about 25 tokens
_TOKENS_PER_QUESTION = 60
_TRIES = 40


@dataclass(frozen=True)
class Interview:
    """``questions`` lookups over ``documents`` of one world, all in one output."""

    questions: int = 36
    documents: int = 8
    name: str = "interview"

    @property
    def setting(self) -> str:
        """Questions and documents."""
        return f"{self.questions} questions, {self.documents} documents"

    def items(self, seeds: range) -> Sequence[Item]:
        """One world an item; the questions are its lines."""
        return [self._item(seed) for seed in seeds]

    def score(self, item: Item, text: str) -> dict[str, float]:
        """The share of the questions whose whole answer is right, word for word; of the first and
        the last third of them, too.
        """
        turns = text.split(ASSISTANT)[: len(item.answers)]
        said = [" ".join(turn.split(USER)[0].split()) for turn in turns]
        said += [""] * (len(item.answers) - len(said))
        right = [a == " ".join(b.split()) for a, b in zip(said, item.answers, strict=True)]
        third = max(1, len(right) // 3)
        return {
            "exact": sum(right) / len(right),
            "exact_first_third": sum(right[:third]) / third,
            "exact_last_third": sum(right[-third:]) / third,
        }

    def _item(self, seed: int) -> Item:
        rng = random.Random(f"interview {seed}")
        world = make_world(seed, WorldConfig(num_documents=self.documents, facts=(4, 6)))
        asked: dict[str, Question] = {}
        for _ in range(_TRIES * self.questions):
            question = ask(world, "lookup", rng)
            if question is not None:
                asked.setdefault(question.text, question)
            if len(asked) == self.questions:
                break
        else:
            raise ValueError(f"a world of {self.documents} documents has fewer questions: ask less")
        texts = tuple(document.text for document in world.documents)
        answers = tuple(question.answer for question in asked.values())
        length = _TOKENS_PER_QUESTION * self.questions
        return Item(str(seed), texts, "\n".join(asked), answers, length)


def report_revision(output: RequestOutput) -> dict[str, float]:
    """The effective KV exposure with 1 to 7 later rows, where rows were revised."""
    if output.revision is None:
        return {}
    ratios = output.revision.exposure
    return {f"exposure_{later}": ratios[later] for later in range(1, len(ratios))}


class InterviewArm(EngineArm):
    """Answers items of `Interview`, with a grammar that writes all questions but the first."""

    def answer(self, items: Sequence[Item]) -> list[Answer]:
        """One long output an item, in one batch."""
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=item.max_tokens,
                ignore_eos=True,
                skip_special_tokens=False,
                grammar=Grammar("lark", conversation_grammar(item.question.split("\n")[1:])),
            )
            for item in items
        ]
        return [Answer(output.text, self.report(output)) for output in self.outputs(items, params)]

    def outputs(
        self, items: Sequence[Item], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """What the engine says to the documents and the first question of each item."""
        return self.llm.chat([self.conversation(item) for item in items], params, **self.policies)

    def conversation(self, item: Item) -> list[Message]:
        """The documents and the first question."""
        documents = [Document(text, context=self.context) for text in item.documents]
        return [{"role": "user", "content": [*documents, item.question.split("\n")[0]]}]


class EvictingArm(InterviewArm):
    """Answers under a policy that throws keys away, which reads the same prompt as text.

    It keeps ``ratio`` of the context in the middle of an output: as many keys as a policy that
    chooses pages by that ratio reads on average."""

    def __init__(self, llm: LLM, policy: SelectPolicy, ratio: float) -> None:
        super().__init__(llm, f"{policy}, ratio {ratio:g}", "prompt")
        self.policy, self.ratio = policy, ratio

    def outputs(
        self, items: Sequence[Item], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """As of any `InterviewArm`, with the documents' tokens as text."""
        prompts = self.llm.engine.prompts
        texts = []
        length = 0.0
        for item in items:
            parts = prompts.from_messages(self.conversation(item))
            texts.append([token for part in parts for token in part.tokens])
            said = "".join([*item.question.split("\n")[1:], *item.answers])
            length += len(texts[-1]) + len(self.llm.engine.tokenizer.encode(said)) / 2
        kept = round(self.ratio * length / len(items))
        select = Select(self.policy, tokens=kept)
        return self.llm.generate([[text] for text in texts], params, select=select)


def conversation_grammar(questions: Sequence[str]) -> str:
    """An answer of one sentence, then each question with an answer behind it."""
    turns = "".join(f" {USER} {json.dumps(question)} {ASSISTANT} answer" for question in questions)
    return f"start: answer{turns}\nanswer: /[^.?<]+[.]/\n"
