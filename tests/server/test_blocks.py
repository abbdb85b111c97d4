"""Blocks of an answer: thoughts, texts and calls, whatever the pieces in which they arrive."""

import random

import pytest

from looseleaf.engine.reports.outputs import CompletionOutput
from looseleaf.server.blocks import Block, BlockBegin, BlockEnd, BlockEvent, Blocks, BlockText
from looseleaf.server.tools.hermes import HermesParser
from looseleaf.server.tools.reader import AnswerReader
from looseleaf.server.tools.reasoning import TagSplitter

CALL = '<tool_call>\n{"name": "get_time", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANSWERS = {
    "text": "Mira Tolland.",
    "thought and text": "<think>Who signs?</think>\nMira Tolland.",
    "thought only": "<think>Who signs",
    "two calls": f"<think>Two.</think>Well.{CALL}\n{CALL}",
    "text after a call": f"{CALL} Done.",
    "a broken call": '<tool_call>{"name": "get_time", "argum',
    "nothing": "",
}


def make() -> Blocks:
    splitter = TagSplitter("<think>", "</think>", opened=False)
    return Blocks(AnswerReader(splitter, HermesParser({"get_time": {}})))


def output(text: str, finish: str | None) -> CompletionOutput:
    return CompletionOutput(0, text, (), finish_reason=finish)


def follow(text: str, cuts: list[int]) -> tuple[Blocks, list[BlockEvent]]:
    blocks = make()
    events = [event for cut in cuts for event in blocks.follow(output(text[:cut], None))]
    events += blocks.follow(output(text, "stop"))
    return blocks, events


def shown(blocks: Blocks) -> list[tuple[str, str, str]]:
    return [(block.kind, block.name, block.text) for block in blocks.blocks]


@pytest.mark.parametrize("name", ANSWERS)
def test_pieces_give_the_blocks_of_the_whole_text(name: str) -> None:
    text, draw = ANSWERS[name], random.Random(name)
    whole, _ = follow(text, [])
    for _ in range(20):
        cuts = sorted(draw.randint(0, len(text)) for _ in range(draw.randint(0, 12)))
        assert shown(follow(text, cuts)[0]) == shown(whole)


@pytest.mark.parametrize("name", ANSWERS)
def test_one_block_is_open_at_a_time_and_its_pieces_are_its_text(name: str) -> None:
    text = ANSWERS[name]
    blocks, events = follow(text, [*range(len(text))])
    open_block: Block | None = None
    pieces: dict[int, str] = {}
    for event in events:
        if isinstance(event, BlockBegin):
            assert open_block is None and event.block.index == len(pieces)
            open_block, pieces[event.block.index] = event.block, ""
        else:
            assert event.block is open_block
            if isinstance(event, BlockText):
                pieces[event.block.index] += event.text
        if isinstance(event, BlockEnd):
            open_block = None
    assert open_block is None
    assert list(pieces.values()) == [block.text for block in blocks.blocks]
    kinds = [block.kind for block in blocks.blocks]
    assert kinds.count("call") == text.count("</tool_call>") and blocks.has_calls == (
        "call" in kinds
    )


def test_an_end_is_seen_once() -> None:
    blocks, _ = follow("Mira.", [2])
    assert blocks.is_complete
    assert blocks.follow(output("Mira.", "stop")) == []
