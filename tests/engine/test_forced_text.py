"""The law of forced text: a text that a grammar prescribes is written byte for byte, by tokens of
any kind of tokenizer."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers

from looseleaf.engine.sampling.grammar import GrammarCompiler
from looseleaf.errors import InvalidRequest
from looseleaf.models import Tokenizer
from looseleaf.sampling_params import Grammar
from tests.models.kinds import KINDS, write_kind

Compiler = Callable[[str], GrammarCompiler]


def composing(backend: Backend) -> None:
    backend.normalizer = normalizers.NFC()


def lowering(backend: Backend) -> None:
    backend.normalizer = normalizers.Lowercase()


def compiler_of(folder: Path, kind: str) -> GrammarCompiler:
    kind, _, changed = kind.partition(", ")
    write_kind(folder, kind)
    if changed:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        {"composing": composing, "lowering": lowering}[changed](backend)
        backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder)
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


@pytest.fixture(
    scope="module", params=[*KINDS, "byte level, composing", "metaspace never, lowering"]
)
def compiler(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> GrammarCompiler:
    return compiler_of(tmp_path_factory.mktemp("kind") / "tokenizer", request.param)


def written(compiler: GrammarCompiler, grammar: Grammar, seed: int = 0) -> str:
    """An output of tokens drawn among the allowed ones."""
    state, rng, ids = compiler.start(grammar, ""), random.Random(seed), list[int]()
    while not state.complete:
        allowed = state.allowed().nonzero().flatten().tolist()
        token = rng.choice(allowed)
        if token in compiler._ends:
            break
        state.push(token)
        ids.append(token)
    return b"".join(map(compiler._tokenizer.token_bytes, ids)).decode()


@given(text=st.text(st.sampled_from('ab é😀zZ"▁\n'), min_size=1, max_size=12))
@example(text=" ")
@example(text=" a")
@example(text="e\u0301")
@example(text="<s>a</s>")
@example(text="<0x41>")
def test_a_text_that_a_grammar_prescribes_is_written_as_it_is(
    text: str, compiler: GrammarCompiler
) -> None:
    literal = Grammar.lark(f"start: {json.dumps(text, ensure_ascii=False)}")
    assert written(compiler, literal) == text


@given(text=st.text(st.sampled_from("ab é😀zZ"), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_text_is_forced_behind_a_choice_as_well(
    text: str, seed: int, compiler: GrammarCompiler
) -> None:
    schema = {"type": "object", "properties": {text: {"enum": [1, text]}}, "required": [text]}
    grammar = Grammar.json_schema({**schema, "additionalProperties": False})
    assert json.loads(written(compiler, grammar, seed)) in ({text: 1}, {text: text})


def test_a_text_that_no_token_can_write_is_an_error(tmp_path: Path) -> None:
    compiler = compiler_of(tmp_path / "tokenizer", "byte level")
    # one byte of the vocabulary is lost
    lost = compiler._tokenizer.encode("z")[0]
    spelled = compiler._tokenizer._token_bytes
    spelled._cache[lost] = b""
    for grammar in (Grammar.lark('start: "z"'), Grammar.lark('start: "a" "z"')):
        with pytest.raises(InvalidRequest):
            written(compiler, grammar)
