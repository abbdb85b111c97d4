"""Reasoning: thoughts are split off, however the text is cut, and no text is lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf.server.tools.events import Content, Event, Markup, Reasoning, collect, join
from looseleaf.server.tools.reasoning import HarmonySplitter, Splitter, TagSplitter, choose_splitter

THINK = "{{ '<think>' }} {{ '</think>' }}"
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
)
TO_CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
PIECES = ["<think>", "</think>", "<thi", "\n", " ", "a<b", "<|channel|>", "analysis", "<|message|>"]
PIECES += ["<|end|>", "<|start|>", "assistant", "final", " to=functions.f", "<|call|>", "text"]


def make(kind: str) -> Splitter:
    if kind == "harmony":
        return HarmonySplitter()
    return TagSplitter("<think>", "</think>", opened=kind == "opened")


def events_of(splitter: Splitter, pieces: list[str]) -> list[Event]:
    return join([event for piece in pieces for event in splitter.feed(piece)] + splitter.finish())


@pytest.mark.parametrize(
    ("kind", "text", "reasoning", "content"),
    [
        ("closed", "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("closed", "Yes. <think> is a tag.", "", "Yes. <think> is a tag."),
        ("closed", "<think>Hm.", "Hm.", ""),
        ("opened", "Hm.\n</think>\nYes.", "Hm.", "Yes."),
        ("opened", "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
        ("harmony", HARMONY, "Hm.", "Yes."),
        ("harmony", TO_CALL, "", TO_CALL),
        ("harmony", "Yes.", "", "Yes."),
    ],
)
def test_a_thought_is_split_off(kind: str, text: str, reasoning: str, content: str) -> None:
    parsed = collect(events_of(make(kind), [text]))
    assert (parsed.reasoning, parsed.content) == (reasoning, content)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["closed", "opened", "harmony"]),
    st.lists(st.sampled_from(PIECES), max_size=9).map("".join),
    st.data(),
)
def test_no_cutting_changes_a_split_and_no_text_is_lost(
    kind: str, text: str, data: st.DataObject
) -> None:
    whole = events_of(make(kind), [text])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert events_of(make(kind), pieces) == whole
    assert events_of(make(kind), [*text]) == whole
    assert "".join(e.text for e in whole if isinstance(e, Content | Markup | Reasoning)) == text


def test_a_template_that_opens_the_thought_in_the_prompt_is_seen() -> None:
    for prompt, reasoning in (("<|assistant|>\n<think>\n", "Yes."), ("<|assistant|>\n", "")):
        splitter = choose_splitter(THINK, prompt)
        assert splitter is not None
        assert collect(events_of(splitter, ["Yes."])).reasoning == reasoning
    assert choose_splitter("{{ messages }}", "") is None
