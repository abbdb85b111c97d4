"""Grammars that take long delay no other caller, end at their deadline, and leave no process."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from looseleaf import AsyncLLM, SamplingParams
from looseleaf.engine.engine import Engine
from looseleaf.engine.sampling import grammar as grammars
from looseleaf.errors import DeadlineExceeded, InvalidRequest, LimitExceeded
from looseleaf.sampling_params import Grammar
from looseleaf.sandbox import Limits
from tests.engine.harness import Folder, make_llm, words

PROMPT = [words(1, 12)]
PLAIN = SamplingParams(max_tokens=4, ignore_eos=True)
NUMBER = 10


def slow(name: str, properties: int) -> Grammar:
    """A schema whose time grows with the square of its optional properties; 5,000: 1.5 s."""
    several = {f"{name}{n}": {"type": "string"} for n in range(properties)}
    return Grammar.json_schema({"type": "object", "properties": several})


def open_llm(folder: Path) -> AsyncLLM:
    return AsyncLLM(folder, dtype="float32", device="cpu", num_pages=96)


async def answer(llm: AsyncLLM, grammar: Grammar | None, salt: str, deadline: float = 60.0) -> str:
    params = PLAIN if grammar is None else SamplingParams(max_tokens=4, grammar=grammar)
    text = ""
    async for output in llm.generate(PROMPT, params, salt=salt, deadline=deadline):
        text = output.outputs[0].text
    return text


def test_other_callers_are_answered_while_slow_grammars_compile(checkpoint: Folder) -> None:
    ended: list[int] = []

    async def hostile(llm: AsyncLLM, number: int) -> None:
        # too large to go on with, which shows only once it is compiled
        with contextlib.suppress(InvalidRequest):
            await answer(llm, slow(f"{number}-", 5000), "red")
        ended.append(number)

    async def scenario() -> None:
        async with open_llm(checkpoint()) as llm:
            tasks = [asyncio.create_task(hostile(llm, number)) for number in range(NUMBER)]
            await asyncio.sleep(0)
            assert await answer(llm, None, "blue")
            assert await answer(llm, Grammar.regex("yes"), "blue") == "yes"
            # neither in the threads that everything else of a server has
            await asyncio.to_thread(int)
            assert len(ended) < NUMBER // 2
            sandbox = llm.engine.grammars.sandbox
            assert 0 < len(sandbox.pids) <= 3
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert sandbox.pids == []

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_slow_grammar_ends_at_its_deadline_with_its_process(checkpoint: Folder) -> None:
    async def scenario() -> None:
        async with open_llm(checkpoint()) as llm:
            assert await answer(llm, Grammar.regex("yes"), "red") == "yes"
            with pytest.raises(DeadlineExceeded, match="deadline"):
                await answer(llm, slow("p", 5000), "red", deadline=0.1)
            # a later one is not delayed by it
            assert await answer(llm, Grammar.regex("no"), "red") == "no"
            # nothing compiles for a caller who has left
            assert len(llm.engine.grammars.sandbox.pids) <= 2

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_grammar_over_its_limit_is_refused_in_one_sentence(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_LIMITS", Limits(seconds=0.1))
    llm = make_llm(checkpoint())
    words_of_limit = r"this request's grammar took more than 0.1 s of computing: simplify"
    with pytest.raises(LimitExceeded, match=words_of_limit) as caught:
        llm.generate(PROMPT, SamplingParams(grammar=slow("p", 5000)))
    assert caught.value.what == "grammar"
    (output,) = llm.generate(PROMPT, SamplingParams(grammar=Grammar.regex("yes")))
    assert output.outputs[0].text == "yes"
    sandbox = llm.engine.grammars.sandbox
    assert len(sandbox.pids) == 1
    llm.close()
    assert sandbox.pids == []


def test_the_engine_s_thread_compiles_nothing(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_CACHE_SIZE", 1)
    add = Engine.add

    def guarded(engine: Engine, *given: object) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(engine.grammars, "_compile", None)
            return add(engine, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "add", guarded)

    async def scenario() -> None:
        async with open_llm(checkpoint()) as llm:
            texts = [str(number) * 2 for number in range(6)]
            asked = [answer(llm, Grammar.regex(text), "red") for text in texts]
            assert await asyncio.gather(*asked) == texts

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_grammar_whose_memory_is_full_is_compiled_anew(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint())
    compiler, grammar = llm.engine.grammars, Grammar.regex("(\\w+ ?){1,500}")
    first = compiler.compile(grammar, "")
    assert compiler.compile(grammar, "") is first
    state = first.start()
    with pytest.raises(InvalidRequest, match="can't go on"):
        state.push(next(iter(llm.engine.tokenizer.eos_token_ids)))
    second = compiler.compile(grammar, "")
    assert second is not first
    assert second.start().allowed().any()
    llm.close()
