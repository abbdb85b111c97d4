"""Many questions answered one after another in one long output, so that errors can add up.

The reference model was trained on conversations, not on long answers. So the conversation is one
output: a grammar writes the questions, and the model every word of the answers. What it made of
earlier questions and answers is never computed again, as it would be if each were a request."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from looseleaf_lab.evals.task import Item
from looseleaf_lab.evals.world import WorldConfig, make_world
from looseleaf_lab.evals.world.tasks import Question, ask

USER, ASSISTANT = "<|user|>", "<|assistant|>"
# an answer and a question take about 25 tokens
_TOKENS_PER_QUESTION = 60
_TRIES = 40


@dataclass(frozen=True)
class Interview:
    """``questions`` lookups over ``documents`` of one world, all in one output."""

    questions: int = 30
    documents: int = 8
    name: str = "interview"

    @property
    def setting(self) -> str:
        return f"{self.questions} questions, {self.documents} documents"

    def items(self, seeds: range) -> Sequence[Item]:
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
        first, *turns = asked
        return Item(str(seed), texts, first, answers, length, turns=tuple(turns))


def conversation_grammar(questions: Sequence[str]) -> str:
    """An answer of one sentence, then each question with an answer behind it."""
    turns = "".join(f" {USER} {json.dumps(question)} {ASSISTANT} answer" for question in questions)
    return f"start: answer{turns}\nanswer: /[^.?<]+[.]/\n"
