"""Chat completions: answers, streams, documents, and the truth about reuse."""

import json
from typing import Any

import pytest

from looseleaf.server.names import REFERENCE_NAME
from looseleaf.server.protocol.answers import ChatCompletion
from tests.server.live import DOCUMENT, QUESTION, Live, chat_body

ANSWER = "Mira Tolland"


def text_of(answer: dict[str, Any], index: int = 0) -> str:
    return str(answer["choices"][index]["message"]["content"])


def streamed(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [c for event in events for c in event["choices"] if c["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_a_question_is_answered_from_its_document(live: Live) -> None:
    response = live.chat(documents=[{"title": "handbook.txt", "text": DOCUMENT}])
    answer = ChatCompletion.model_validate(response.json())
    assert ANSWER in answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    (document,) = answer.looseleaf.documents
    assert document.title == "handbook.txt"
    assert 0 < document.tokens < answer.usage.prompt_tokens


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"documents": [{"text": DOCUMENT}]},
        {"temperature": 1, "seed": 3, "n": 3},
        {"logprobs": True, "top_logprobs": 3},
        {"stop": ["Tolland"], "documents": [{"text": DOCUMENT}]},
    ],
    ids=["plain", "documents", "three", "logprobs", "stop"],
)
def test_a_stream_tells_what_the_whole_answer_tells(live: Live, fields: dict[str, Any]) -> None:
    whole = live.chat(**fields).json()
    body = chat_body(stream=True, stream_options={"include_usage": True}, **fields)
    events = live.events("/v1/chat/completions", body)
    for choice in whole["choices"]:
        index = choice["index"]
        assert streamed(events, index) == choice["message"]["content"]
        own = [c for event in events for c in event["choices"] if c["index"] == index]
        assert [c["finish_reason"] for c in own][-1] == choice["finish_reason"]
        assert all(c["finish_reason"] is None for c in own[:-1])
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        if choice["logprobs"] is not None:
            entries = [e for c in own if c["logprobs"] for e in c["logprobs"]["content"]]
            assert [e["token"] for e in entries] == [
                e["token"] for e in choice["logprobs"]["content"]
            ]
    assert {event["id"] for event in events} == {events[0]["id"]}
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert events[-1]["looseleaf"]["text_tokens"] == whole["looseleaf"]["text_tokens"]


def test_the_first_and_the_last_chunk_tell_what_was_reused(live: Live) -> None:
    body = chat_body(stream=True, documents=[{"text": DOCUMENT}])
    events = live.events("/v1/chat/completions", body)
    assert [n for n, event in enumerate(events) if "looseleaf" in event] == [0, len(events) - 1]
    assert events[0]["looseleaf"]["documents"] == events[-1]["looseleaf"]["documents"]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["looseleaf"]["times"]["total"] > 0


def test_documents_in_another_order_are_reused_and_never_counted_as_a_prefix(live: Live) -> None:
    texts = [f"{DOCUMENT} The number of this page is {n}." for n in range(3)]
    documents = [{"id": f"page-{n}", "text": text} for n, text in enumerate(texts)]
    first = live.chat(documents=documents).json()["looseleaf"]
    assert [d["source"] for d in first["documents"]] == ["computed"] * 3
    assert first["document_tokens_reused"] == 0
    turned = live.chat(documents=documents[::-1]).json()
    second = turned["looseleaf"]
    assert [d["id"] for d in second["documents"]] == ["page-2", "page-1", "page-0"]
    assert [d["source"] for d in second["documents"]] == ["cached"] * 3
    assert second["document_tokens_computed"] == 0
    assert second["document_tokens_reused"] == sum(d["tokens"] for d in first["documents"])
    cached = turned["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == second["text_tokens_cached"] + second["document_tokens_reused"]
    assert second["text_tokens_cached"] <= second["text_tokens"]
    assert cached < turned["usage"]["prompt_tokens"]


def test_a_list_of_documents_stands_before_the_text_of_the_last_user_message(live: Live) -> None:
    part = {"type": "document", "text": DOCUMENT}
    inside = [{"role": "user", "content": [part, {"type": "text", "text": QUESTION}]}]
    body = {"model": REFERENCE_NAME, "messages": inside}
    placed = live.post("/tokenize", body).json()
    turns = [{"role": "user", "content": QUESTION}]
    listed = live.post("/tokenize", {**body, "messages": turns, "documents": [{"text": DOCUMENT}]})
    assert listed.json() == placed


def test_a_document_part_stands_exactly_where_it_is(live: Live) -> None:
    part = {"type": "document", "text": DOCUMENT}
    before = [part, {"type": "text", "text": QUESTION}]
    behind = [{"type": "text", "text": QUESTION}, part, {"type": "text", "text": " Say it."}]
    offsets = [
        live.chat(messages=[{"role": "user", "content": content}]).json()["looseleaf"]["documents"][
            0
        ]["offset"]
        for content in (before, behind)
    ]
    assert offsets[0] < offsets[1]


@pytest.mark.parametrize("marker", ["<|document|>", "<|end|>", "<|assistant|>", "<|begin|>"])
def test_text_that_looks_like_a_marker_stays_text(live: Live, marker: str) -> None:
    tokenizer = live.service.llm.engine.tokenizer
    plain, marked = (
        live.post(
            "/tokenize",
            {
                "messages": [{"role": "user", "content": f"What is {text}?"}],
                "documents": [{"text": f"{DOCUMENT} {text}", "title": text}],
            },
        ).json()["tokens"]
        for text in ("x", marker)
    )
    special = [sum(i in tokenizer.special_token_ids for i in ids) for ids in (plain, marked)]
    assert special[0] == special[1]
    assert tokenizer.decode(marked, skip_special=False).count(marker) >= 2


def test_the_same_seed_gives_the_same_answer_and_other_outputs_differ(live: Live) -> None:
    first, second = (
        live.chat(temperature=1.5, seed=11, n=4, ignore_eos=True).json()["choices"]
        for _ in range(2)
    )
    assert first == second
    assert len({choice["message"]["content"] for choice in first}) > 1


def test_logprobs_name_the_token_and_the_likeliest_in_falling_order(live: Live) -> None:
    answer = live.chat(logprobs=True, top_logprobs=4, documents=[{"text": DOCUMENT}]).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    for entry in content:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 4
        assert values == sorted(values, reverse=True)
        assert entry["logprob"] == values[0], "greedy takes the likeliest"
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]


def test_an_answer_follows_a_json_schema(live: Live) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["ok", "kind"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = live.chat(response_format=form, max_tokens=64).json()
    value = json.loads(text_of(answer))
    assert set(value) == {"ok", "kind"}
    assert isinstance(value["ok"], bool)
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_strict_schema_closes_its_objects(live: Live) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"name": "answer", "strict": True, "schema": schema}
    format_ = {"type": "json_schema", "json_schema": form}
    for seed in range(6):
        answer = live.chat(response_format=format_, max_tokens=64, seed=seed, temperature=1).json()
        assert [*json.loads(text_of(answer))] == ["ok"]


def test_no_character_of_an_answer_ends_a_line_of_a_stream(live: Live) -> None:
    """Clients that split a stream as text take more than a line feed for an end of a line."""
    text = "\x85a\u2028b\u2029c"
    schema = {"name": "text", "schema": {"enum": [text]}}
    fields = {"response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": 40}
    events = live.events("/v1/chat/completions", chat_body(stream=True, **fields))
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert json.loads("".join(pieces)) == text


def test_fields_that_ask_for_nothing_are_taken(live: Live) -> None:
    nothing = ["tools", "functions", "audio", "prediction", "web_search_options"]
    fields = {**dict.fromkeys(nothing), "tool_choice": "none", "function_call": "none"}
    fields |= {"parallel_tool_calls": True, "modalities": ["text"], "store": True}
    fields |= {"skip_special_tokens": True, "add_generation_prompt": True, "priority": 0}
    fields |= {"echo": False, "use_beam_search": False, "metadata": {"a": "b"}}
    fields |= {"prompt_cache_key": "a", "safety_identifier": "b", "length_penalty": 1.0}
    answer = live.chat(**fields, service_tier="auto")
    assert answer.status_code == 200, answer.text
    assert "x-looseleaf-warning" not in answer.headers
    for field, value in [("use_beam_search", True), ("modalities", ["audio"]), ("priority", 1)]:
        refused = live.chat(**{field: value})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith(field)


def test_what_is_empty_asks_for_nothing(live: Live) -> None:
    turn = {"role": "assistant", "content": "Yes.", "tool_calls": [], "annotations": []}
    turns = [{"role": "user", "content": "Is it?"}, turn, {"role": "user", "content": "Where?"}]
    empty = {"tools": [], "functions": [], "metadata": {}, "reasoning_effort": "none"}
    answer = live.chat(messages=turns, max_tokens=1, **empty)
    assert answer.status_code == 200, answer.text
    quiet = {"include_usage": True, "include_obfuscation": False}
    body = chat_body(stream=True, stream_options=quiet, max_tokens=1)
    assert live.events("/v1/chat/completions", body)[-1]["usage"]
    error = live.chat(functions={"a": 1}).json()["error"]
    assert error["param"] == "functions"
    assert error["message"].startswith("functions is not supported")
    loud = {"stream": True, "stream_options": {"include_obfuscation": True}}
    assert live.chat(**loud).status_code == 400
    raw = {"model": REFERENCE_NAME, "prompt": "x", "suffix": "", "max_tokens": 1}
    assert live.post("/v1/completions", raw).status_code == 200


def test_stop_strings_and_limits_end_an_answer(live: Live) -> None:
    documents = [{"text": DOCUMENT}]
    stopped = live.chat(documents=documents, stop="Tolland").json()["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["message"]["content"].endswith("Mira ")
    cut = live.chat(documents=documents, max_completion_tokens=1, max_tokens=None).json()
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens"] == 1


def test_an_answer_can_be_sent_back_as_it_came(live: Live) -> None:
    message = live.chat().json()["choices"][0]["message"]
    turns = [{"role": "user", "content": QUESTION}, message, {"role": "user", "content": "Why?"}]
    assert live.chat(messages=turns).status_code == 200


def test_completions_of_texts_and_of_tokens_agree(live: Live) -> None:
    body = {"model": REFERENCE_NAME, "temperature": 0, "max_tokens": 8, "logprobs": 2}
    tokens = live.post("/tokenize", {"prompt": QUESTION}).json()["tokens"]
    by_text = live.post("/v1/completions", {**body, "prompt": QUESTION}).json()
    by_tokens = live.post("/v1/completions", {**body, "prompt": tokens}).json()
    both = live.post("/v1/completions", {**body, "prompt": [QUESTION, "The archive"]}).json()
    assert by_text["choices"] == by_tokens["choices"]
    assert both["choices"][0]["text"] == by_text["choices"][0]["text"]
    assert [choice["index"] for choice in both["choices"]] == [0, 1]
    columns = by_text["choices"][0]["logprobs"]
    assert {len(column) for column in columns.values()} == {by_text["usage"]["completion_tokens"]}
    events = live.events(
        "/v1/completions", {**body, "prompt": [QUESTION, "The archive"], "stream": True}
    )
    for choice in both["choices"]:
        pieces = [c["text"] for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(pieces) == choice["text"]


def test_token_ids_are_taken_as_they_are(live: Live) -> None:
    body = {"model": REFERENCE_NAME, "max_tokens": 1}
    begun = live.service.llm.engine.tokenizer.bos_token_id
    for prompt, count in (([7, 8, 9], 3), ([begun, 7], 2), ([[7, 8], [9]], 3)):
        usage = live.post("/v1/completions", {**body, "prompt": prompt}).json()["usage"]
        assert usage["prompt_tokens"] == count


@pytest.mark.parametrize("top", [0, 2])
def test_the_token_that_was_drawn_is_among_the_likeliest_of_a_completion(
    live: Live, top: int
) -> None:
    body = {"model": REFERENCE_NAME, "prompt": "The archive", "temperature": 2.0, "seed": 3}
    answer = live.post("/v1/completions", {**body, "max_tokens": 40, "logprobs": top}).json()
    logprobs = answer["choices"][0]["logprobs"]
    tokens = zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    )
    assert all(shown[token] == logprob for token, logprob, shown in tokens)
    assert {len(shown) for shown in logprobs["top_logprobs"]} <= {top, top + 1}


def test_completions_read_documents(live: Live) -> None:
    body = {"model": REFERENCE_NAME, "prompt": QUESTION, "documents": [{"text": DOCUMENT}]}
    report = live.post("/v1/completions", body).json()["looseleaf"]
    assert len(report["documents"]) == 1


def test_a_document_in_the_context_of_the_prompt_reads_as_text_that_stands_there(
    live: Live,
) -> None:
    documents = [
        {"text": "The archive is in the north wing."},
        {"title": "handbook", "text": DOCUMENT},
    ]
    reused = live.chat(documents=documents).json()
    exact = live.chat(documents=[documents[0], {**documents[1], "context": "prompt"}]).json()
    assert ANSWER in text_of(exact)
    # the same tokens at the same places, but for those of one document text
    assert exact["usage"]["prompt_tokens"] == reused["usage"]["prompt_tokens"]
    report, before = exact["looseleaf"], reused["looseleaf"]
    assert [document["title"] for document in before["documents"]] == [None, "handbook"]
    assert [document["title"] for document in report["documents"]] == [None]
    moved = before["documents"][1]["tokens"]
    assert report["text_tokens"] == before["text_tokens"] + moved


def test_documents_in_the_context_of_the_prompt_say_what_full_prefill_says(live: Live) -> None:
    documents = [
        {"text": f"The seal of {name} is anchor."} for name in ("Orlen Gate", "Mill House")
    ]
    fields = {"logprobs": True, "max_tokens": 4}
    exact = [{**document, "context": "prompt"} for document in documents]
    parts = [{"type": "document", **document} for document in exact] + [
        {"type": "text", "text": QUESTION}
    ]
    inside = [{"role": "user", "content": parts}]
    answers = [
        live.chat(documents=exact, **fields),
        live.chat(documents=documents, fuse="all", **fields),
        live.chat(messages=inside, **fields),
    ]
    logprobs = [answer.json()["choices"][0]["logprobs"] for answer in answers]
    likely = [[entry["logprob"] for entry in value["content"]] for value in logprobs]
    for other in likely[1:]:
        assert other == pytest.approx(likely[0], abs=1e-3)


def test_a_completion_takes_documents_in_every_context(live: Live) -> None:
    body = {"model": REFERENCE_NAME, "prompt": QUESTION, "temperature": 0, "max_tokens": 4}
    counts = {}
    for context in ("lead", "alone", "prompt"):
        documents = [{"text": DOCUMENT, "context": context}]
        answer = live.post("/v1/completions", {**body, "documents": documents})
        assert answer.status_code == 200, answer.text
        counts[context] = len(answer.json()["looseleaf"]["documents"])
    assert counts == {"lead": 1, "alone": 1, "prompt": 0}


def test_a_prompt_with_a_seed_is_answered_the_same_wherever_it_stands(live: Live) -> None:
    body = {"model": REFERENCE_NAME, "temperature": 1.5, "max_tokens": 12, "ignore_eos": True}

    def texts(*prompts: str, **fields: Any) -> list[str]:
        answer = live.post("/v1/completions", {**body, "prompt": list(prompts), **fields})
        return [choice["text"] for choice in answer.json()["choices"]]

    (alone,) = texts(QUESTION, seed=5)
    assert texts("The archive", QUESTION, seed=5)[1] == alone
    assert texts(QUESTION, "The archive", QUESTION, seed=5)[::2] == [alone, alone]
    assert len(set(texts(QUESTION, seed=5, n=3))) == 3, "several answers are asked for by n"


def test_unknown_fields_are_named_in_a_header_and_ignored(live: Live) -> None:
    messages = [{"role": "user", "content": QUESTION, "weight": 1, "name": "Ann"}]
    answer = live.chat(tempreature=1, messages=messages, max_tokens=1)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-looseleaf-warning"] == "unknown fields ignored: tempreature, weight"
    assert live.chat(documents=[{"text": DOCUMENT, "colour": 1}]).status_code == 400


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"structured_outputs": {"choice": ["a+b", "c"]}}, {"a+b", "c"}),
        ({"guided_regex": "x{3}"}, {"xxx"}),
        ({"structured_outputs": {"grammar": 'start: "y" "z"'}}, {"yz"}),
        ({"guided_json": {"enum": [7]}}, {"7"}),
    ],
)
def test_a_constraint_of_another_servers_name_holds(
    live: Live, fields: dict[str, Any], texts: set[str]
) -> None:
    answer = live.chat(**fields)
    assert answer.status_code == 200, answer.text
    assert text_of(answer.json()) in texts
    both = {**fields, "response_format": {"type": "json_object"}}
    assert live.chat(**both).status_code == 400


def test_no_tokens_may_be_asked_for(live: Live) -> None:
    answer = live.chat(max_tokens=0).json()
    assert text_of(answer) == ""
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


def test_salts_part_cached_documents(live: Live) -> None:
    documents = [{"text": f"{DOCUMENT} Salted."}]

    def source(**fields: Any) -> Any:
        answer = live.chat(documents=documents, max_tokens=1, **fields).json()
        return answer["looseleaf"]["documents"][0]["source"]

    assert source(cache_salt="a") == "computed"
    assert source(cache_salt="b") == "computed"
    assert source(cache_salt="a") == "cached"
    assert source() == "computed"


def test_tokens_become_text_again(live: Live) -> None:
    tokens = live.post("/tokenize", {"prompt": QUESTION}).json()["tokens"]
    assert live.post("/detokenize", {"tokens": tokens}).json()["prompt"].endswith(QUESTION)
    assert live.post("/detokenize", {"tokens": [10**9]}).status_code == 400
    assert live.client.get("/version").json()["version"]
    assert live.client.get("/tokenizer_info").json()["chat_template"]
    (model,) = live.client.get("/v1/models").json()["data"]
    assert model["root"] == model["id"]


def test_special_tokens_are_left_out_as_other_servers_do(live: Live) -> None:
    def tokens(prompt: str, **fields: Any) -> list[int]:
        ids: list[int] = live.post("/tokenize", {"prompt": prompt, **fields}).json()["tokens"]
        return ids

    info = live.client.get("/tokenizer_info").json()
    bos = info["bos_token_id"]
    assert tokens(QUESTION) == [bos, *tokens(QUESTION, add_special_tokens=False)]
    assert tokens(info["eos_token"], add_special_tokens=False) == info["eos_token_ids"][:1]
    assert tokens(info["bos_token"], add_special_tokens=False) == [bos]
    refused = {"prompt": QUESTION, "add_special_tokens": False, "documents": [{"text": DOCUMENT}]}
    assert live.post("/tokenize", refused).status_code == 400


def test_the_last_message_is_continued_where_it_ends(live: Live) -> None:
    documents = [{"text": DOCUMENT}]
    whole = live.chat(documents=documents, return_token_ids=True).json()["choices"][0]
    text = whole["message"]["content"]
    # tokens begin with the space before a word
    middle = text.index(" ", len(text) // 2)
    begun, rest = text[:middle], text[middle:]
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": begun}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    answer = live.chat(documents=documents, messages=messages, return_token_ids=True, **fields)
    choice = answer.json()["choices"][0]
    # the prompt is the first one's, then the beginning of the answer, and no end marker
    prompt = whole["prompt_token_ids"]
    assert choice["prompt_token_ids"][: len(prompt)] == prompt
    assert choice["message"]["content"] == rest
    refused = live.chat(messages=messages[:1], continue_final_message=True)
    assert refused.status_code == 400 and "assistant" in refused.json()["error"]["message"]
    both = live.chat(messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert both.status_code == 400


def test_a_prompt_may_end_without_the_head_of_an_answer(live: Live) -> None:
    open_ended, closed = (
        live.chat(return_token_ids=True, max_tokens=1, **fields).json()["choices"][0]
        for fields in ({}, {"add_generation_prompt": False})
    )
    prompt = closed["prompt_token_ids"]
    assert open_ended["prompt_token_ids"][: len(prompt)] == prompt
    assert len(prompt) < len(open_ended["prompt_token_ids"])


def test_a_stream_has_the_ids_of_its_prompt_once(live: Live) -> None:
    fields = {"return_token_ids": True, "max_tokens": 6, "ignore_eos": True, "n": 2}
    sampled = {**fields, "temperature": 1.0, "seed": 3}
    whole = live.chat(**sampled).json()["choices"]
    body = chat_body(stream=True, **sampled)
    chunks = [event["choices"] for event in live.events("/v1/chat/completions", body)]
    for index in range(2):
        mine = [c for choices in chunks for c in choices if c["index"] == index]
        prompts = [c["prompt_token_ids"] for c in mine if "prompt_token_ids" in c]
        assert prompts == [whole[index]["prompt_token_ids"]]
        assert "prompt_token_ids" in mine[0]
        tokens = [token for choice in mine for token in choice.get("token_ids", [])]
        assert tokens == whole[index]["token_ids"]


def test_every_chunk_may_count_along(live: Live) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = chat_body(max_tokens=6, ignore_eos=True, stream=True, stream_options=options)
    events = live.events("/v1/chat/completions", body)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 6
    assert len(set(counts)) > 3
