"""Routers and replicas give a document the same tag, wherever a body has it."""

from looseleaf.router import affinity_of, registered_tag, response_tag, text_tag

DOCUMENT = {"title": "Travel", "text": "Mira Tolland signs travel requests."}


def chat(*messages, **fields):
    return {
        "messages": [{"role": role, "content": content} for role, content in messages],
        **fields,
    }


def test_documents_are_found_in_lists_and_in_messages():
    tag = text_tag("Travel", DOCUMENT["text"])
    listed = affinity_of(chat(("user", "Who?"), documents=[DOCUMENT]))
    part = {"type": "document", **DOCUMENT}
    inside = affinity_of(chat(("user", [part, {"type": "text", "text": "Who?"}])))
    source = {"type": "document", "title": "Travel", "source": {"data": DOCUMENT["text"]}}
    foreign = affinity_of({"input": [{"role": "user", "content": [source]}]})
    weights = ((tag, 1 + len(DOCUMENT["text"]) // 4),)
    assert listed.documents == inside.documents == foreign.documents == weights


def test_a_document_counts_once():
    affinity = affinity_of(chat(("user", "Who?"), documents=[DOCUMENT, DOCUMENT]))
    assert len(affinity.documents) == 1


def test_registered_documents_have_the_tag_of_their_id():
    affinity = affinity_of({"prompt": "Who?", "documents": [{"id": "a"}, {"id": "a"}]})
    assert [tag for tag, _ in affinity.documents] == [registered_tag("a")]
    assert affinity.registered == ("a",)
    # an id beside a text is a label
    assert affinity_of({"documents": [{"id": "a", **DOCUMENT}]}).registered == ()


def test_title_and_text_are_parted():
    assert text_tag("a", "bc") != text_tag("ab", "c")
    assert text_tag(None, ["a", "b"]) != text_tag(None, "ab")
    assert text_tag("a", "") != registered_tag("a")


def test_the_turns_of_a_conversation_share_a_tag():
    first = affinity_of(chat(("user", "Who?")))
    second = affinity_of(chat(("user", "Who?"), ("assistant", "Mira."), ("user", "And then?")))
    assert first.conversation == second.conversation
    assert second.conversation_tokens > first.conversation_tokens
    other = affinity_of(chat(("user", "Who?"), documents=[DOCUMENT]))
    assert other.conversation != first.conversation


def test_a_session_names_a_conversation():
    first = affinity_of(chat(("user", "Who?")), session="s")
    second = affinity_of(chat(("user", "When?")), session="s")
    assert first.conversation == second.conversation
    assert affinity_of(chat(("user", "a"), prompt_cache_key="s")).conversation == first.conversation


def test_any_json_has_an_affinity():
    for body in (None, [], 3, {"documents": 1, "messages": [1, {"content": 2}]}, {"input": None}):
        assert affinity_of(body).documents == ()
    assert affinity_of({"documents": [{"text": "\ud800"}]}).documents


def test_a_stored_response_has_the_affinity_of_its_conversation() -> None:
    first = affinity_of({"input": "Who?"})
    name = f"resp_{first.conversation}{'0' * 32}"
    assert response_tag(name) == first.conversation
    assert response_tag("resp_1") is None and response_tag(f"msg_{name}") is None
    later = affinity_of({"input": "And then?", "previous_response_id": name})
    assert later.conversation == first.conversation
    assert affinity_of(None, name).conversation == first.conversation
