"""Who enters while a step runs ahead is booked, whether or not there is something to compute."""

import dataclasses
from pathlib import Path

from looseleaf.prompt.request import Request
from tests.engine.harness import GREEDY, Folder, assert_idle, document, words
from tests.engine.test_ahead import ahead
from tests.engine.tiered import forget_pool, load_always, sources, tiered

BEGINNING = list(range(5, 37))


def test_who_enters_with_nothing_to_do_but_wait_is_told_what_it_found(
    checkpoint: Folder, tmp_path: Path
) -> None:
    llm = tiered(checkpoint(), tmp_path / "disk")
    load_always(llm)
    engine, prompts = llm.engine, llm.engine.prompts
    asked = [BEGINNING, document(1, 40), words(3, 9)]
    llm.generate([asked], GREEDY)
    forget_pool(llm)
    # the text in front of the document is there, and the document is not
    llm.generate([[[*BEGINNING, 7]]], GREEDY)
    ahead(llm)
    engine.add(
        Request(
            "first", prompts.from_parts(words(4, 20)), dataclasses.replace(GREEDY, max_tokens=2)
        )
    )
    engine.step()
    second = engine.add(Request("second", prompts.from_parts(asked), GREEDY))
    while engine.has_work:
        engine.step()
        engine.check()
    assert_idle(llm)
    output = second.output()
    assert sources(output) == ["loaded"]
    assert output.reuse.text_tokens_cached == 32
    assert output.metrics.admitted is not None
    assert engine.counters.documents_loaded == 1
