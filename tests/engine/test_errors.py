"""What can't be served is refused with a sentence that says what to do; nothing stays behind."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from looseleaf import LLM, Document, Fuse, Revise, SamplingParams, Select
from looseleaf.errors import (
    CheckpointNotFound,
    EmptyDocument,
    EngineClosed,
    InvalidOption,
    InvalidRequest,
    LooseleafError,
    PoolTooSmall,
    PromptTooLong,
)
from looseleaf.prompt.request import PolicyOptions, Prompt, Request, with_policies
from tests.checkpoints import VOCAB_SIZE
from tests.engine.harness import GREEDY, Folder, ask, assert_idle, document, make_llm, words

LEAD, A = words(1, 19), document(1, 40)


@pytest.fixture(scope="module")
def llm(checkpoint: Folder) -> LLM:
    return make_llm(checkpoint(), num_pages=14, max_model_len=256)


REFUSED: dict[str, tuple[Prompt, type[LooseleafError], str]] = {
    "longer-than-context": (words(1, 300), PromptTooLong, "max_model_len"),
    "document-larger-than-pool": ([LEAD, document(2, 230), "?"], PoolTooSmall, "enlarge the cache"),
    "ends-with-document": ([LEAD, A], InvalidRequest, "question behind the documents"),
    "empty": ([], InvalidRequest, "empty"),
    "empty-text": ("", InvalidRequest, "empty"),
    "unknown-token": ([[5, VOCAB_SIZE]], InvalidRequest, "vocabulary"),
    "half-a-pair": ("so \ud800", InvalidRequest, "surrogate pair at character 3"),
    "bare-ids": ([1, 2], InvalidRequest, "ids into a list of their own"),  # type: ignore[list-item]
    "no-part": ([LEAD, 3.5], InvalidRequest, "a string, a Document or a list"),  # type: ignore[list-item]
    "message": ({"role": "user"}, InvalidRequest, "messages are for llm.chat"),  # type: ignore[dict-item]
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", REFUSED)
def test_a_prompt_that_cannot_be_served_is_refused_before_anything_runs(
    llm: LLM, name: str
) -> None:
    prompt, error, message = REFUSED[name]
    steps = llm.engine.counters.steps
    with pytest.raises(error, match=message):
        llm.generate([[LEAD, A, "fine?"], prompt], GREEDY)
    assert llm.engine.counters.steps == steps
    assert_idle(llm)
    assert len(ask(llm, [[LEAD, A, "still?"]])) == 1


@pytest.mark.usefixtures("unchecked")
def test_a_document_at_the_top_of_the_prompts_is_explained(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="list of their own"):
        llm.generate([A, "who?"], GREEDY)  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match="list of their own"):
        llm.generate([1, 2, 3], GREEDY)  # type: ignore[list-item]


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_prompt_and_no_conversation_is_refused(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint())
    with pytest.raises(InvalidRequest, match="list of prompts, not int"):
        llm.generate(5, GREEDY)  # type: ignore[arg-type]
    for system in (None, llm.hold_system_prompt(words(5, 20))):
        with pytest.raises(InvalidRequest, match="a message is a dict"):
            llm.chat("who?", GREEDY, system_prompt=system)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="surrogate"):
        llm.chat([{"role": "user", "content": ["\udfff", "?"]}], GREEDY)
    with pytest.raises(InvalidRequest, match="a list of messages, not NoneType"):
        llm.chat(None, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="a message's content is a string, or a list"):
        llm.chat([{"role": "user", "content": 3}], GREEDY)
    with pytest.raises(InvalidRequest, match="needs a string as its 'text'"):
        llm.chat([{"role": "user", "content": [{"type": "text"}]}], GREEDY)
    for work in (llm.register, llm.host):
        with pytest.raises(InvalidRequest, match="only a Document can be computed ahead, not str"):
            work("some text")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="an index is an IndexConfig, not str"):
        llm.host(A, index="graph")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="document_id must be a string, not 3"):
        llm.register(A, document_id=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="a system prompt is a string, not int"):
        llm.hold_system_prompt(3)  # type: ignore[arg-type]
    llm.engine.check()
    assert not llm.engine.has_work


def test_prompts_may_come_from_an_iterator(llm: LLM) -> None:
    both = [[LEAD, A, "one?"], [LEAD, "two?"]]
    expected = [output.token_ids for output in llm.generate(both, GREEDY)]
    assert [output.token_ids for output in llm.generate(iter(both), GREEDY)] == expected


def test_several_threads_may_ask(llm: LLM) -> None:
    prompts: list[Prompt] = [[LEAD, A, f"who {n}?"] for n in range(6)]
    expected = [output.token_ids for output in llm.generate(prompts, GREEDY)]
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda prompt: llm.generate([prompt], GREEDY)[0], prompts))
    assert [output.token_ids for output in answers] == expected
    assert_idle(llm)


@pytest.mark.usefixtures("unchecked")
def test_nothing_is_asked_of_one_that_is_closed(checkpoint: Folder) -> None:
    with make_llm(checkpoint(), num_pages=14) as llm:
        assert llm.generate(["who?"], GREEDY)[0].token_ids
    for ask_again in (lambda: llm.generate(["who?"], GREEDY), lambda: llm.register(A)):
        with pytest.raises(EngineClosed, match="make a new one"):
            ask_again()
    with pytest.raises(EngineClosed, match="not complete"):
        llm.engine.step()
    llm.close()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_pages": "5"}, "num_pages must be a whole number, not '5'"),
        ({"num_pages": 5.5}, "num_pages must be a whole number, not 5.5"),
        ({"max_num_seqs": True}, "max_num_seqs must be a whole number, not True"),
        ({"disk_gib": "16"}, "disk_gib must be a number"),
        ({"memory_gib": float("inf")}, "memory_gib must be a finite number"),
        ({"host_gib": float("inf")}, "host_gib must be a finite number"),
        ({"prefix_caching": "no"}, "prefix_caching must be True or False, not 'no'"),
        ({"salt": 3}, "salt must be a string, not 3"),
        ({"salt": "\ud800"}, "salt has half of a surrogate pair"),
        ({"num_pages": 10**12}, "lower memory_gib or num_pages"),
        ({"memory_gib": 1e9}, "lower memory_gib or num_pages"),
        ({"host_gib": 1e7}, "lower host_gib or staging_gib"),
        ({"tier_packing": "yes"}, "unknown tier_packing 'yes': use auto, on or off"),
    ],
    ids=str,
)
def test_options_of_the_wrong_kind_or_size_are_refused(
    checkpoint: Folder, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidOption, match=sentence):
        LLM(checkpoint(), device="cpu", **options)


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_a_document_without_text_is_refused(text: str) -> None:
    with pytest.raises(EmptyDocument, match="'empty' is empty"):
        Document(text, name="empty")
    with pytest.raises(EmptyDocument, match="text 2 of document 'empty'"):
        Document(["one", text, "three"], name="empty")
    with pytest.raises(EmptyDocument, match="'empty' is empty"):
        Document([], name="empty")


@pytest.mark.usefixtures("unchecked")
def test_a_document_of_a_wrong_kind_is_refused() -> None:
    with pytest.raises(InvalidOption, match="must be a string"):
        Document(b"bytes")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="holds Document"):
        Document(["text", Document("text")])  # type: ignore[list-item]
    with pytest.raises(InvalidOption, match="'lead', 'alone' or 'prompt'"):
        Document("text", context="nowhere")  # type: ignore[arg-type]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_page": 9}, "unknown option 'num_page': did you mean num_pages"),
        ({"page_size": 17}, "16, 32 or 64"),
        ({"num_pages": 0}, "positive"),
        ({"max_num_seqs": 0}, "positive"),
        ({"max_num_batched_tokens": 3, "max_num_seqs": 4}, "at least max_num_seqs"),
        ({"max_model_len": 0}, "positive"),
        ({"device": "abacus"}, "device"),
        ({"device": "meta"}, "not supported"),
        ({"dtype": "int8"}, "dtype"),
        ({"memory_gib": 1e-9}, "raise it"),
    ],
    ids=str,
)
def test_an_option_that_is_unknown_or_out_of_range_is_refused(
    checkpoint: Folder, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidOption, match=message):
        LLM(checkpoint(), **options)


def test_a_checkpoint_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        LLM(tmp_path / "nothing")


def test_a_request_id_in_use_is_refused_and_the_first_goes_on(llm: LLM) -> None:
    parts = llm.engine.prompts.from_parts([LEAD, A, "who?"])
    first = llm.engine.add(Request("same", parts, GREEDY))
    llm.engine.step()
    with pytest.raises(InvalidRequest, match="'same' is in use"):
        llm.engine.add(Request("same", parts, GREEDY))
    while not first.finished:
        llm.engine.step()
    assert_idle(llm)
    # an id is free again once its request has ended
    llm.engine.add(Request("same", parts, GREEDY))
    llm.engine.abort("same")
    llm.engine.abort("same")
    llm.engine.abort("never heard of")
    assert_idle(llm)


def test_stop_ids_and_biases_outside_the_vocabulary_are_refused(llm: LLM) -> None:
    for options in ({"stop_token_ids": [VOCAB_SIZE]}, {"logit_bias": {VOCAB_SIZE: 1.0}}):
        with pytest.raises(InvalidRequest, match=str(VOCAB_SIZE)):
            llm.generate("who?", SamplingParams(**options))  # type: ignore[arg-type]
    assert_idle(llm)


def test_as_many_parameters_as_prompts_or_one(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="2 prompts but 3"):
        llm.generate(["a", "b"], [GREEDY] * 3)


def test_a_pinned_pool_refuses_what_it_cannot_admit_and_recovers(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint(), num_pages=9)
    ask(llm, [[LEAD, document(1, 90), "?"]])
    pinned = [s for s in llm.engine.store.segments() if s.length > 16]
    for segment in pinned:
        llm.engine.store.pin(segment)
    with pytest.raises(PoolTooSmall, match="pinned"):
        llm.generate(words(3, 60), GREEDY)
    llm.engine.check()
    assert not llm.engine.has_work
    # one that fits at first and then grows into what is pinned
    with pytest.raises(PoolTooSmall, match="pinned"):
        llm.generate(words(4, 5), SamplingParams(max_tokens=60, ignore_eos=True))
    llm.engine.check()
    for segment in pinned:
        llm.engine.store.unpin(segment)
    assert_idle(llm)
    assert len(ask(llm, [words(3, 60)])) == 1


def test_a_conversation_needs_messages_of_one_shape(llm: LLM) -> None:
    message = {"role": "user", "content": "who?"}
    with pytest.raises(InvalidRequest, match="at least one message"):
        llm.chat([])
    with pytest.raises(InvalidRequest, match="mixture"):
        llm.chat([message, [message]])  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match="role"):
        llm.chat([{"role": "<|system|>", "content": "who?"}])
    with pytest.raises(InvalidRequest, match="content part"):
        llm.chat([{"role": "user", "content": [{"type": "image"}]}])
    with pytest.raises(InvalidRequest, match="no role 'usr': use system, user, assistant"):
        llm.chat([{"role": "usr", "content": "who?"}])
    handle = llm.hold_system_prompt("Be brief.")
    for empty in ({"role": "system"}, {"role": "user", "content": None}):
        for system in (None, handle):
            with pytest.raises(InvalidRequest, match=f"role '{empty['role']}' has no content"):
                llm.chat([empty, message], system_prompt=system)
    assert_idle(llm)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"fuse": "many"}, "unknown selector 'many'"),
        ({"fuse": {"selector": "links"}}, "fuse is a looseleaf.Fuse, or the selector"),
        ({"select": 3}, "select is a looseleaf.Select, or the policy"),
        ({"select": "quest", "revise": "x"}, "revise is a looseleaf.Revise, or the window"),
        ({"select": "quest", "revise": 99}, "1 to 9, not 99"),
        ({"select": "quest", "revise": True}, "window must be a whole number"),
        ({"salt": None}, "salt must be a string"),
        ({"deadline": "1"}, "deadline must be a positive number of seconds"),
        ({"sampling_params": {"temperature": 0}}, r"a dict: write SamplingParams\(temperature=0\)"),
        ({"sampling_params": {}}, "not a dict"),
        ({"sampling_params": 5}, r"not int: write them as in SamplingParams\("),
        ({"sampling_params": [{"top_k": 3}]}, r"write SamplingParams\(top_k=3\)"),
        ({"select": "window", "revise": 2}, "policy 'window' chooses none"),
    ],
    ids=str,
)
def test_what_goes_with_a_prompt_is_refused_if_it_is_of_a_wrong_kind(
    llm: LLM, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidOption, match=sentence):
        llm.generate([[LEAD, A, "who?"]], **options)
    assert_idle(llm)


UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0}, r"has no option 'temperature': .*SamplingParams\(temperature=0\)"),
    ({"stream": True}, "has no option 'stream': llm.stream gives"),
    ({"fuze": "links"}, "has no option 'fuze': did you mean fuse\\? its options are fuse, select"),
    (
        {"temprature": 0},
        "has no option 'temprature': if temperature is meant, that goes into SamplingParams",
    ),
    ({"xyzzy": 0}, "has no option 'xyzzy': its options are fuse, select, revise, salt, deadline"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("options", "sentence"), UNKNOWN, ids=str)
def test_a_keyword_that_there_is_not_is_explained_by_the_method(
    llm: LLM, options: dict[str, Any], sentence: str
) -> None:
    turns = [{"role": "user", "content": "who?"}]
    with pytest.raises(InvalidOption, match=f"generate {sentence}"):
        llm.generate("who?", **options)
    with pytest.raises(InvalidOption, match=f"chat {sentence}"):
        llm.chat(turns, **options)
    with pytest.raises(InvalidOption, match=f"stream {sentence}"):
        llm.stream("who?", **options)
    assert_idle(llm)


@pytest.mark.parametrize(
    ("names", "policies"),
    [
        ({"fuse": "links"}, {"fuse": Fuse("links")}),
        ({"select": "quest"}, {"select": Select("quest")}),
        ({"select": "quest", "revise": 3}, {"select": Select("quest"), "revise": Revise(3)}),
    ],
    ids=str,
)
def test_a_policy_may_be_given_by_its_first_field(
    llm: LLM, names: PolicyOptions, policies: PolicyOptions
) -> None:
    request = Request("any", llm.engine.prompts.from_parts([LEAD, A, "who?"]), GREEDY)
    assert with_policies(request, **names) == with_policies(request, **policies)
    (short,) = llm.generate([[LEAD, A, "who?"]], GREEDY, **names)
    (long,) = llm.generate([[LEAD, A, "who?"]], GREEDY, **policies)
    assert (short.token_ids, short.select, short.reuse.fuse) == (
        long.token_ids,
        long.select,
        long.reuse.fuse,
    )
