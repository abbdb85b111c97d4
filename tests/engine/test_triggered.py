"""Grammars from a trigger on: free text before, a whole block after, for every cutting."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from looseleaf.engine.sampling.call_blocks import CallBlock, CallItem
from looseleaf.engine.sampling.grammar import GrammarCompiler
from looseleaf.engine.sampling.triggered import TriggeredState
from looseleaf.errors import InvalidRequest
from looseleaf.models import Tokenizer
from looseleaf.sampling_params import Grammar
from tests.models.kinds import write_kind

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def block(schema: object = CITY, *, exact: bool = True, trigger: str = "<call>") -> CallBlock:
    """One call between tags."""
    arguments = CallItem(schema=json.dumps(schema), exact=exact)
    return CallBlock(((CallItem(f"{trigger}f "), arguments, CallItem("</call>")),), trigger=trigger)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(write_kind(folder, "byte level"))
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


def state(compiler: GrammarCompiler, call_block: CallBlock) -> TriggeredState:
    started = compiler.start(call_block.grammar(), "")
    assert isinstance(started, TriggeredState)
    return started


def ids(compiler: GrammarCompiler, text: str, *, whole: bool = True) -> list[int]:
    """The tokens of ``text``, or one for each of its bytes."""
    encode = compiler._tokenizer.encode
    if whole:
        return encode(text)
    return [token for character in text for token in encode(character)]


def push(state: TriggeredState, tokens: Sequence[int]) -> None:
    for token in tokens:
        state.push(token)


@pytest.mark.parametrize("whole", [True, False])
def test_text_is_free_until_the_trigger_is_complete(compiler: GrammarCompiler, whole: bool) -> None:
    output = state(compiler, block())
    push(output, ids(compiler, "So <b> and <cal", whole=whole))
    assert output.allowed() is None and output.accepting
    push(output, ids(compiler, "l>", whole=whole))
    allowed = output.allowed()
    assert allowed is not None and not output.accepting
    (first,) = ids(compiler, "f")
    assert allowed[first] and not allowed[ids(compiler, "g")[0]]


@pytest.mark.parametrize("whole", [True, False])
def test_text_is_free_again_after_the_block(compiler: GrammarCompiler, whole: bool) -> None:
    output = state(compiler, block())
    text = 'So <call>f {"city":"Oslo"}</call>'
    for _ in range(2):
        push(output, ids(compiler, text, whole=whole))
        assert output.allowed() is None and output.accepting and not output.complete


def test_a_block_refuses_another_text(compiler: GrammarCompiler) -> None:
    output = state(compiler, block())
    push(output, ids(compiler, "<call>f "))
    with pytest.raises(InvalidRequest):
        push(output, ids(compiler, '{"town": 1}'))


def test_an_anchored_trigger_counts_at_the_begin_and_after_a_block(
    compiler: GrammarCompiler,
) -> None:
    call_block = block()
    anchored = CallBlock(call_block.calls, trigger=call_block.trigger, anchored=True)
    later = state(compiler, anchored)
    push(later, ids(compiler, "So <call>"))
    assert later.allowed() is None
    first = state(compiler, anchored)
    for _ in range(2):
        push(first, ids(compiler, "\n <call>"))
        assert first.allowed() is not None
        push(first, ids(compiler, 'f {"city":"Oslo"}</call>'))
        assert first.allowed() is None


def test_an_added_token_is_a_trigger(compiler: GrammarCompiler) -> None:
    marker, token = next(
        (marker, token) for marker, token in compiler._added.items() if marker.isascii()
    )
    output = state(compiler, block(trigger=marker))
    push(output, ids(compiler, "So "))
    assert output.allowed() is None
    output.push(token)
    assert output.allowed() is not None
    push(output, ids(compiler, 'f {"city":"Oslo"}</call>'))
    assert output.allowed() is None


def test_an_inexact_schema_that_no_grammar_follows_is_any_object(compiler: GrammarCompiler) -> None:
    schema = {**CITY, "not": {"required": ["town"]}}
    with pytest.raises(InvalidRequest, match="schema of the tools"):
        state(compiler, block(schema))
    output = state(compiler, block(schema, exact=False))
    push(output, ids(compiler, 'So <call>f {"town":1}</call>'))
    assert output.allowed() is None


def test_a_source_that_is_no_block_is_refused(compiler: GrammarCompiler) -> None:
    for source in ("{", "[]", '{"calls": []}', '{"calls": [[{"wobble": 1}]]}'):
        with pytest.raises(InvalidRequest, match="can't be read"):
            compiler.compile(Grammar("calls", source), "")


@pytest.mark.parametrize("anchored", [True, False])
def test_blanks_and_empty_tokens_before_a_trigger_are_not_kept(
    compiler: GrammarCompiler, anchored: bool
) -> None:
    call_block = CallBlock(block().calls, trigger="<call>", anchored=anchored)
    output = state(compiler, call_block)
    empty = len(output._grammar.words)
    (newline,) = ids(compiler, "\n")
    for _ in range(100):
        push(output, [newline, empty])
        assert len(output._recent) < len("<call>")
    first, *rest = ids(compiler, "<call>", whole=False)
    push(output, [first, *[empty] * 100])
    assert len(output._recent) <= len("<call>")
    push(output, rest)
    assert output.allowed() is not None
    push(output, ids(compiler, 'f {"city":"Oslo"}</call>'))
    assert output.allowed() is None
