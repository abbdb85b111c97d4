"""Many questions with one long output for all answers, so that errors accumulate.

The reference model was trained on conversations, not on long answers. So the conversation is one
output: a grammar writes the questions, and the model writes the answers. Keys of earlier questions
and answers are never recomputed, as they would be in separate requests."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from looseleaf_lab.evals.task import Item
from looseleaf_lab.evals.world import WorldConfig, make_world
from looseleaf_lab.evals.world.tasks import Question, ask

USER, ASSISTANT = "<|user|>", "<|assistant|>"
# an answer and a question have about 25 tokens
_TOKENS_PER_QUESTION = 60
_TRIES = 40


@dataclass(frozen=True)
class Interview:
    """``questions`` lookups over ``documents`` of one world, in one output."""

    questions: int = 30
    documents: int = 8
    name: str = "interview"

    @property
    def setting(self) -> str:
        return f"{self.questions} questions, {self.documents} documents"

    def items(self, seeds: range) -> Sequence[Item]:
        return [self._item(seed) for seed in seeds]

    def score(self, item: Item, text: str) -> dict[str, float]:
        """The share of questions with an exact answer, over all and over the first and the last
        third."""
        turns = text.split(ASSISTANT)[: len(item.answers)]
        answer_texts = [" ".join(turn.split(USER)[0].split()) for turn in turns]
        answer_texts += [""] * (len(item.answers) - len(answer_texts))
        is_right = [
            a == " ".join(b.split()) for a, b in zip(answer_texts, item.answers, strict=True)
        ]
        third = max(1, len(is_right) // 3)
        return {
            "exact": sum(is_right) / len(is_right),
            "exact_first_third": sum(is_right[:third]) / third,
            "exact_last_third": sum(is_right[-third:]) / third,
        }

    def _item(self, seed: int) -> Item:
        rng = random.Random(f"interview {seed}")
        world = make_world(seed, WorldConfig(num_documents=self.documents, facts=(4, 6)))
        questions: dict[str, Question] = {}
        for _ in range(_TRIES * self.questions):
            question = ask(world, "lookup", rng)
            if question is not None:
                questions.setdefault(question.text, question)
            if len(questions) == self.questions:
                break
        else:
            raise ValueError(
                f"a world of {self.documents} documents has fewer than {self.questions} questions: "
                "ask for fewer"
            )
        texts = tuple(document.text for document in world.documents)
        answers = tuple(question.answer for question in questions.values())
        length = _TOKENS_PER_QUESTION * self.questions
        first, *turns = questions
        return Item(str(seed), texts, first, answers, length, turns=tuple(turns))


def conversation_grammar(questions: Sequence[str]) -> str:
    """A Lark grammar: an answer of one sentence, then each question followed by an answer."""
    turns = "".join(f" {USER} {json.dumps(question)} {ASSISTANT} answer" for question in questions)
    return f"start: answer{turns}\nanswer: /[^.?<]+[.]/\n"
