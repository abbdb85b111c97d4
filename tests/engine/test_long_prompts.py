"""A long prompt is tokenized beside the event loop: whoever else is on it goes on."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from looseleaf import AsyncLLM, Document
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.errors import InvalidRequest, PromptTooLong
from looseleaf.models.tokenizer.tokenizer import LONG_TEXT
from looseleaf.prompt.builder import PromptBuilder, num_characters
from tests.engine.harness import GREEDY, Folder, document
from tests.engine.test_async import engine, last, run

LONG = "the river and the house " * (LONG_TEXT // 20)
TURNS = [{"role": "user", "content": LONG}]
ASKED: dict[str, Callable[[AsyncLLM], AsyncIterator[RequestOutput]]] = {
    "text": lambda llm: llm.generate(LONG),
    "document": lambda llm: llm.generate([Document(LONG), "who?"]),
    "conversation": lambda llm: llm.chat(TURNS),
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_others_on_the_loop_go_on_while_a_long_prompt_is_tokenized(
    checkpoint: Folder,
    monkeypatch: pytest.MonkeyPatch,
    asked: Callable[[AsyncLLM], AsyncIterator[RequestOutput]],
) -> None:
    begun, others = threading.Event(), threading.Event()
    assemble = PromptBuilder._assemble

    def slowly(self: PromptBuilder, *given: Any, **named: Any) -> Any:
        begun.set()
        assert others.wait(20), "the loop stood still"
        return assemble(self, *given, **named)

    async def other() -> None:
        await asyncio.to_thread(begun.wait)
        others.set()

    async def scenario(llm: AsyncLLM) -> None:
        going_on = asyncio.create_task(other())
        with pytest.raises(PromptTooLong):
            await last(asked(llm))
        await going_on

    with engine(checkpoint) as llm:
        monkeypatch.setattr(PromptBuilder, "_assemble", slowly)
        run(lambda: scenario(llm))


def test_a_long_prompt_is_the_one_that_was_asked(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("looseleaf.llm.preparation.LONG_TEXT", 20)
    parts: list[Any] = [document(1, 40), "the river and the house"]

    async def scenario(llm: AsyncLLM) -> None:
        stream = llm.generate(parts, GREEDY)
        expected = await last(llm.generate([*parts], GREEDY))
        parts.append("by the river")
        found = await last(stream)
        assert found.prompt_token_ids == expected.prompt_token_ids
        assert found.text == expected.text

    with engine(checkpoint) as llm:
        run(lambda: scenario(llm))


@pytest.mark.usefixtures("unchecked")
def test_a_short_prompt_that_is_none_is_refused_where_it_is_asked(checkpoint: Folder) -> None:
    wrong: Any = {"role": "user"}
    with engine(checkpoint) as llm, pytest.raises(InvalidRequest, match="a list of parts"):
        llm.generate(wrong)


@pytest.mark.parametrize(
    ("given", "number"),
    [
        ("four", 4),
        (["four", Document("five5"), [1, 2, 3]], 12),
        ([{"role": "user", "content": [{"type": "text", "text": "four"}, "6"]}], 4 + 4 + 4 + 1),
        (iter(["four"]), 0),
        ([None, 1.5, {}], 0),
    ],
)
def test_characters_are_counted_wherever_they_stand(given: Any, number: int) -> None:
    assert num_characters(given) == number
