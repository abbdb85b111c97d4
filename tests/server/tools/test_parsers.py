"""Tool parsers: documented forms are calls, all other text is content, and no text is lost."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf.server.tools.base import Body, ToolParser
from looseleaf.server.tools.bodies import JsonBody, NamedJsonBody, TaggedBody
from looseleaf.server.tools.events import CallArguments, CallBegin, Content, Event, Markup, join
from looseleaf.server.tools.glm import GlmParser
from looseleaf.server.tools.registry import PARSERS, choose_parser

HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
PYTHON = "<|python_tag|>"
CALL = '{"name": "f", "parameters": {"a": 1}}'
TOOLS = {"f": {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}, "g": {}}

FORMS = [
    ("hermes", HERMES, "", [("f", {"a": 1})]),
    ("hermes", f"Let me see.\n{HERMES}\n{HERMES}", "Let me see.\n", [("f", {"a": 1})] * 2),
    ("hermes", HERMES.removesuffix("\n</tool_call>"), "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    (
        "hermes",
        HERMES.replace('{"a": 1}', '{"t": "</tool_call>"}'),
        "",
        [("f", {"t": "</tool_call>"})],
    ),
    ("hermes", '{"name": "f", "arguments": {"a": 1}}', "", [("f", {"a": 1})]),
    (
        "hermes",
        'So:\n```json\n{\n  "name": "f",\n  "arguments": {"a": 1}\n}\n```',
        "So:\n",
        [("f", {"a": 1})],
    ),
    ("llama3_json", CALL, "", [("f", {"a": 1})]),
    ("llama3_json", f"{PYTHON}{CALL}; {CALL}", "", [("f", {"a": 1})] * 2),
    ("pythonic", '[f(a=1, s="x]"), g()]', "", [("f", {"a": 1, "s": "x]"}), ("g", {})]),
    (
        "pythonic",
        "<|python_start|>[f(a=[1, {'b': None}])]<|python_end|>",
        "",
        [("f", {"a": [1, {"b": None}]})],
    ),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", {"a": 1}), ("g", {})],
    ),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}',
        "",
        [("f", {"a": 1}), ("g", {})],
    ),
    ("mistral", 'Hm.[TOOL_CALLS]f{"a": 1}', "Hm.", [("f", {"a": 1})]),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', "", [("f", {"a": 1})]),
    ("phi", 'functools[{"name": "f", "arguments": {"a": 1}}]', "", [("f", {"a": 1})]),
    (
        "phi",
        '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>',
        "",
        [("f", {"a": 1})],
    ),
    (
        "glm",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>s</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "",
        [("f", {"a": 1, "s": "1"})],
    ),
    (
        "gemma",
        "<start_function_call>call:f{a:1,s:<escape>x, {y}<escape>}<end_function_call>",
        "",
        [("f", {"a": 1, "s": "x, {y}"})],
    ),
    (
        "gemma",
        '<|tool_call>call:f{a:[1,true],s:{b:<|"|>z<|"|>}}<tool_call|>',
        "",
        [("f", {"a": [1, True], "s": {"b": "z"}})],
    ),
    ("gemma", "```tool_code\nf(a=1)\n```", "", [("f", {"a": 1})]),
    (
        "harmony",
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        "",
        [("f", {"a": 1})],
    ),
    (
        "harmony",
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}',
        "",
        [("f", {"a": 1})],
    ),
]

BROKEN = [
    ("hermes", "<tool_call>\nnot JSON\n</tool_call>"),
    ("hermes", " \n<tool_call> none"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>'),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x'),
    ("hermes", '{"name": "unknown", "arguments": {}}'),
    ("hermes", '{"name": "f", "arguments": {}, "more": 1}'),
    ("hermes", '```json\n{"name": "f", "parameters": {}}\n```'),
    ("llama3_json", '{"colour": "red"}'),
    ("llama3_json", '{"name": "Bob", "parameters": {}}'),
    ("llama3_json", f"As in {CALL}"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=open('x'))]"),
    ("mistral", "[TOOL_CALLS] none"),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": '),
    ("granite", "<|tool_call|>[1]"),
    ("phi", "functools are Python's"),
    ("glm", "<tool_call>f\n<arg_key>a</arg_key></tool_call>"),
    ("gemma", "<start_function_call>call:f{a:<escape>x}<end_function_call>"),
    ("harmony", "<|channel|>final<|message|>Hello"),
]

PIECES = [
    *{piece for name, text, _, _ in FORMS for piece in (text, text[: len(text) // 2])},
    *(
        "<tool_call>",
        "</tool_call>",
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        "f(",
        ")",
        ",",
        ";",
        " ",
        "\n",
        "1",
    ),
    *("[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "functools", "<arg_key>", "<|channel|>", "text"),
]


def events_of(parser: ToolParser, pieces: list[str]) -> list[Event]:
    return join([event for piece in pieces for event in parser.feed(piece)] + parser.finish())


@pytest.mark.parametrize(("name", "text", "content", "calls"), FORMS)
def test_a_documented_form_is_a_call(
    name: str, text: str, content: str, calls: list[tuple[str, dict]]
) -> None:
    parsed = PARSERS[name].parse(text, TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls
    assert parsed.content == content


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_a_broken_form_is_content_byte_for_byte(name: str, text: str) -> None:
    parsed = PARSERS[name].parse(text, TOOLS)
    assert parsed.calls == ()
    assert parsed.content == text


def test_a_call_after_a_broken_call_is_read() -> None:
    broken = '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>'
    parsed = PARSERS["hermes"].parse(broken + HERMES)
    assert parsed.content == broken
    assert len(parsed.calls) == 1


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(sorted(PARSERS)),
    st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=6).map("".join),
    st.booleans(),
    st.data(),
)
def test_no_cutting_changes_an_event_and_no_text_is_lost(
    name: str, text: str, eager: bool, data: st.DataObject
) -> None:
    whole = events_of(PARSERS[name](TOOLS, eager=eager), [text])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert events_of(PARSERS[name](TOOLS, eager=eager), pieces) == whole
    letters = events_of(PARSERS[name](TOOLS, eager=eager), [*text])
    assert letters == whole
    assert "".join(e.text for e in whole if isinstance(e, Content | Markup)) == text


@given(st.text(alphabet="abc <>\n", max_size=40), st.sampled_from(sorted(PARSERS)))
def test_text_without_markers_is_content(text: str, name: str) -> None:
    assert PARSERS[name].parse(text).content == text


def test_an_eager_parser_sends_arguments_while_the_call_is_written() -> None:
    parser = PARSERS["hermes"](eager=True)
    sent = parser.feed('<tool_call>{"name": "f", "arguments": {"city": "Os')
    assert sent == [CallBegin(0, "f"), CallArguments(0, '{"city": "Os')]
    assert parser.feed('lo"}') == [CallArguments(0, 'lo"}')]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>{{ x }}</tool_call>", "hermes"),
        ("<tool_call>{{ x }}<arg_key></arg_key></tool_call>", "glm"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        ('<|start_header_id|> \'{"name": "\' ... \'"parameters": \'', "llama3_json"),
        ("<|tool_call|>", "granite"),
    ],
)
def test_a_template_names_its_parser(template: str, name: str) -> None:
    parser = choose_parser(template)
    assert parser is not None and parser.name == name
    assert choose_parser("{{ messages }}") is None


GLM_VALUE = "<tool_call>f<arg_key>a</arg_key><arg_value>"
GEMMA_CALL = "<start_function_call>call:f{a:"
REPEATED = [
    ("glm", "", "<tool_call>", ""),
    ("glm", "", "<tool_call>", "</tool_call>"),
    ("glm", "", GLM_VALUE, ""),
    ("glm", "", GLM_VALUE, "x</tool_call>"),
    ("gemma", "", "<start_function_call>", ""),
    ("gemma", "", GEMMA_CALL, ""),
    ("gemma", "", GEMMA_CALL, "<end_function_call>"),
    ("hermes", '<tool_call>{"', "<tool_call>", ""),
    ("mistral", '[TOOL_CALLS]f{"', "[TOOL_CALLS]", ""),
]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The characters that each call of `Body.feed` has read."""
    sizes: list[int] = []

    def counted(kind: type[Body]) -> None:
        feed = kind.feed

        def count(self: Body, text: str) -> None:
            sizes.append(len(text))
            feed(self, text)

        monkeypatch.setattr(kind, "feed", count)

    for kind in (JsonBody, NamedJsonBody, TaggedBody):
        counted(kind)
    return sizes


@pytest.mark.parametrize(("name", "before", "marker", "after"), REPEATED)
def test_many_markers_are_read_in_linear_time(
    read: list[int], name: str, before: str, marker: str, after: str
) -> None:
    totals = []
    for number in (500, 2000):
        read.clear()
        text = before + marker * number + after
        assert PARSERS[name].parse(text).content == text
        totals.append(sum(read))
    # four times the text, and not sixteen times the work
    assert totals[1] < 6 * totals[0]


def test_a_tag_without_a_close_hides_no_form_of_another_kind() -> None:
    unclosed = GEMMA_CALL * 40
    parsed = PARSERS["gemma"].parse(f"{unclosed}```tool_code\nf(a=1)\n```")
    assert parsed.content == unclosed
    assert [call.name for call in parsed.calls] == ["f"]


@pytest.mark.parametrize("number", [15, 16, 17, 40])
def test_the_limit_of_failed_blocks_does_not_depend_on_the_cutting(number: int) -> None:
    call = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    text = GLM_VALUE * number + f"</arg_value>x{call} {call}"
    whole = events_of(GlmParser(), [text])
    for size in (1, 7, 1000):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert events_of(GlmParser(), pieces) == whole
    parsed = GlmParser.parse(text)
    # the last call is outside of all failed blocks
    assert len(parsed.calls) == (2 if number < 16 else 1)
    assert parsed.content.startswith(GLM_VALUE * number)


def test_blanks_in_a_call_are_read_in_linear_time() -> None:
    start = time.process_time()
    for name, begin in (("glm", "<tool_call>"), ("mistral", "[TOOL_CALLS]")):
        text = f"{begin}{' ' * 20_000}!"
        assert PARSERS[name].parse(text).content == text
    # milliseconds, and many seconds if the blanks are read again from each of them
    assert time.process_time() - start < 3


def test_a_list_where_an_object_is_due_is_no_call_for_every_cutting() -> None:
    text = '<tool_call>[{"name": "f", "arguments": {"a": 1}}]'
    whole = events_of(PARSERS["hermes"](eager=True), [text])
    assert whole == [Content(text)] == events_of(PARSERS["hermes"](eager=True), [*text])
