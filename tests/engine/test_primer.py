"""Primers and default policies: documents are computed behind a primer that no request reads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from looseleaf import LLM, Document, Fuse
from looseleaf.config import PolicyFile
from looseleaf.errors import InvalidOption
from looseleaf.kv.store import Segment
from looseleaf.llm.llm import make_config
from looseleaf.llm.load import load_model
from looseleaf.prompt.request import DocumentPart, Prompt, Request, TextPart
from tests.engine.harness import (
    GREEDY,
    TOLERANCE,
    Folder,
    ask,
    assert_idle,
    assert_same_answers,
    document,
    make_llm,
    words,
)
from tests.engine.tiered import forget_pool, load_always, sources, tiered

PRIMER = (words(71, 21), words(72, 14))
FIRST, SECOND = document(1, 40), document(2, 23)


def prompt(*documents: Document) -> Prompt:
    return [words(1, 9), *documents, words(3, 7)]


@pytest.fixture
def policy(checkpoint: Folder, tmp_path: Path) -> Path:
    """A policy file of the Llama checkpoint, with a primer and without blending."""
    return write_policy(checkpoint("llama"), tmp_path / "policy.json")


def write_policy(folder: Path, path: Path, fuse: Fuse | None = None) -> Path:
    shape = load_model(folder, make_config({"device": "cpu", "dtype": "float32"})).shape
    PolicyFile.of(shape, fuse, PRIMER).write(path)
    return path


def primed(folder: Path, policy: Path, **options: Any) -> LLM:
    return make_llm(folder, policy=str(policy), **options)


def values_of(llm: LLM, length: int) -> torch.Tensor:
    """The stored values of the only segment of this length, ``[layers, heads, tokens, dim]``."""
    (segment,) = [s for s in llm.engine.store.segments() if s.length == length and s.ready]
    return _values(llm, segment)


def _values(llm: LLM, segment: Segment) -> torch.Tensor:
    pages = llm.engine.store.pool.kv[:, 1][:, list(segment.pages)]
    return pages.transpose(1, 2).flatten(2, 3)[:, :, : segment.length]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_primed_document_has_the_keys_of_the_same_text_behind_lead_and_primer(
    checkpoint: Folder, tmp_path: Path, family: str
) -> None:
    folder = checkpoint(family)
    llm = primed(folder, write_policy(folder, tmp_path / "policy.json"))
    ask(llm, [prompt(FIRST, SECOND)])
    lead, _, second, question = llm.engine.prompts.from_parts(prompt(FIRST, SECOND))
    defaults = llm.engine._defaults
    assert defaults is not None
    primer = defaults.primer
    plain = make_llm(folder)
    longer = TextPart((*lead.tokens, *primer))
    parts = (longer, DocumentPart(second.tokens, len(longer.tokens), "second"), question)
    progress = plain.engine.add(Request("plain", parts, GREEDY))
    while plain.engine.has_work:
        plain.engine.step()
    assert progress.error is None
    size = len(second.tokens)
    assert torch.allclose(values_of(llm, size), values_of(plain, size), atol=TOLERANCE)


def test_a_single_document_is_exact_and_others_differ_from_plain_reuse(
    checkpoint: Folder, policy: Path
) -> None:
    folder = checkpoint("llama")
    llm, plain = primed(folder, policy), make_llm(folder)
    assert_same_answers(ask(llm, [prompt(FIRST)]), ask(plain, [prompt(FIRST)]))
    (mine,), (other,) = ask(llm, [prompt(FIRST, SECOND)]), ask(plain, [prompt(FIRST, SECOND)])
    assert not torch.allclose(mine.logits[0], other.logits[0], atol=1e-3)


def test_the_first_document_has_no_primer_behind_any_text(checkpoint: Folder, policy: Path) -> None:
    folder = checkpoint("llama")
    parts = [words(1, 9), Document(SECOND.text, context="alone"), words(3, 7)]
    llm, plain = primed(folder, policy), make_llm(folder)
    assert_same_answers(ask(llm, [parts]), ask(plain, [parts]))
    assert len(llm.engine._defaults.primer) not in {s.length for s in llm.engine.store.segments()}


def test_answers_do_not_depend_on_what_is_cached(checkpoint: Folder, policy: Path) -> None:
    folder = checkpoint("llama")
    prompts = [prompt(FIRST, SECOND), prompt(SECOND, FIRST), prompt(document(3), SECOND, FIRST)]
    alone = [ask(primed(folder, policy), [parts])[0] for parts in prompts]
    llm = primed(folder, policy)
    assert_same_answers(ask(llm, prompts), alone)
    again = ask(llm, prompts)
    assert_same_answers(again, alone)
    assert {source for answer in again for source in sources(answer.output)} == {"cached"}


def test_another_request_computes_primer_and_documents_of_one_that_ends(
    checkpoint: Folder, policy: Path
) -> None:
    folder = checkpoint("llama")
    (alone,) = ask(primed(folder, policy), [prompt(FIRST, SECOND)])
    llm = primed(folder, policy, max_num_batched_tokens=16, max_num_seqs=4)
    engine = llm.engine
    parts = engine.prompts.from_parts(prompt(FIRST, SECOND))
    engine.add(Request("one", parts, GREEDY))
    other = engine.add(Request("two", parts, GREEDY))
    steps = 0
    while engine.has_work:
        if steps == 2:
            engine.abort("one")
        engine.step()
        engine.check()
        steps += 1
    assert steps > 3 and other.error is None
    assert other.output().token_ids == alone.token_ids
    assert_idle(llm)


def test_a_document_that_is_computed_ahead_is_cached_in_every_place(
    checkpoint: Folder, policy: Path
) -> None:
    llm = primed(checkpoint("llama"), policy)
    parts = llm.engine.prompts.from_parts([words(1, 9), SECOND, words(3, 7)])
    llm.engine.warm((*parts[:-1], TextPart(())))
    while llm.engine.has_work:
        llm.engine.step()
    assert_idle(llm)
    (answer,) = ask(llm, [prompt(SECOND)])
    assert sources(answer.output) == ["cached"]
    (answer,) = ask(llm, [prompt(FIRST, SECOND)])
    assert sources(answer.output) == ["computed", "cached"]


def test_primed_documents_come_back_from_tiers(checkpoint: Folder, tmp_path: Path) -> None:
    folder = checkpoint()
    path = write_policy(folder, tmp_path / "policy.json")
    prompts = [prompt(FIRST, SECOND), prompt(SECOND, document(3))]
    llm = tiered(folder, host_gib=0.01, policy=str(path))
    load_always(llm)
    first = ask(llm, prompts)
    forget_pool(llm)
    again = ask(llm, prompts)
    assert_same_answers(again, first)
    assert "computed" not in {s for answer in again for s in sources(answer.output)}


def test_a_document_too_long_for_the_primer_is_computed_without_it(
    checkpoint: Folder, policy: Path
) -> None:
    folder = checkpoint("llama")
    length = 9 + 20 + 50 + 7 + 6
    llm, plain = (
        make_llm(folder, max_model_len=length, **options)
        for options in ({"policy": str(policy)}, {})
    )
    prompts = [prompt(document(1, 20), document(2, 50))]
    assert_same_answers(ask(llm, prompts), ask(plain, prompts))


def test_a_request_takes_the_policy_of_the_file_unless_it_names_one(
    checkpoint: Folder, tmp_path: Path
) -> None:
    folder = checkpoint("llama")
    path = write_policy(folder, tmp_path / "policy.json", Fuse("first", ratio=0.25))
    llm = primed(folder, path)
    chosen = [
        output.reuse.fuse and output.reuse.fuse.selector
        for fuse in (None, Fuse("random", ratio=0.5), Fuse("none"))
        for output in llm.generate([prompt(FIRST, SECOND)], GREEDY, fuse=fuse)
    ]
    assert chosen == ["first", "random", None]


def test_a_file_of_another_form_or_model_is_refused(checkpoint: Folder, policy: Path) -> None:
    folder = checkpoint("llama")
    content = json.loads(policy.read_text(encoding="utf-8"))
    assert PolicyFile.read(policy).primer == PRIMER
    for change, sentence in (
        ({"form": 2}, "no policy file of this version"),
        ({"primer": [""]}, "no policy file of this version"),
        ({"fuse": {"selector": "first", "share": 1}}, "share"),
        ({"fuse": {"selector": "first", "ratio": 2}}, "ratio"),
        ({"model": {**content["model"], "num_layers": 99}}, "num_layers 99"),
    ):
        policy.write_text(json.dumps({**content, **change}), encoding="utf-8")
        with pytest.raises(InvalidOption, match=sentence):
            primed(folder, policy)
    policy.write_text("{", encoding="utf-8")
    with pytest.raises(InvalidOption, match="can't be read"):
        primed(folder, policy)
