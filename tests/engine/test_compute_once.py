"""Engines with one shared tier: a document is computed by one of them, also if an engine ends."""

import threading
import time

import pytest

from looseleaf.prompt.request import Document, Request
from tests.engine.harness import ask, assert_same_answers
from tests.engine.tiered import PARAMS, load_always, prompts, sources, tiered
from tests.tiers.s3_server import moto_server, s3_server

__all__ = ["moto_server", "s3_server"]


@pytest.fixture(params=["remote", "objects"])
def url(request):
    name = "redis_server" if request.param == "remote" else "s3_server"
    return request.getfixturevalue(name).url


def engines(checkpoint, url, number=2):
    llms = [tiered(checkpoint(), remote_url=url, compute_once=True) for _ in range(number)]
    for llm in llms:
        load_always(llm)
    return llms


def test_each_document_is_computed_by_one_engine(checkpoint, url):
    plain = ask(tiered(checkpoint()), prompts(), PARAMS)
    both, answers = engines(checkpoint, url), {}
    threads = [
        threading.Thread(target=lambda n=n, m=m: answers.update({n: ask(m, prompts(), PARAMS)}))
        for n, m in enumerate(both)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number in range(len(both)):
        assert_same_answers(answers[number], plain)
    computed = [llm.engine.counters.documents_computed for llm in both]
    documents = {d.name for answer in plain for d in answer.output.reuse.documents}
    assert sum(computed) == len(documents)
    for llm in both:
        llm.close()


def test_an_engine_takes_over_from_one_that_ended(checkpoint, url):
    first, second = engines(checkpoint, url)
    for claims in (first.engine.tiering.claims, second.engine.tiering.claims):
        # an object store states times in whole seconds
        claims.seconds = 3.0
    tier = first.engine.tiers.shared
    sequence = prompts()[0]
    # the first engine announces all, then ends before it has computed one
    tier_keys = []
    claim = second.engine.tiers.shared.claim

    def record(key, owner, seconds):
        if key not in tier_keys:
            tier_keys.append(key)
            assert tier.claim(key, "ended", 3.0)
        return claim(key, owner, seconds)

    second.engine.tiers.shared.claim = record
    begin = time.monotonic()
    answers = ask(second, [sequence], PARAMS)
    assert time.monotonic() - begin > 0.5
    assert "computed" in sources(answers[0].output)
    for llm in (first, second):
        llm.close()


def test_requests_that_wait_for_another_engine_do_not_block_others(checkpoint, redis_server):
    """Each waits for the claim of an engine that computes; the scheduler looks behind them."""
    llm = tiered(checkpoint(), remote_url=redis_server.url, compute_once=True, max_num_seqs=16)
    engine = llm.engine
    engine.tiering.claims.awaits = lambda missing: True
    for number in range(12):
        parts = engine.prompts.from_parts([Document(f"{number} " * 40), "who?"])
        engine.add(Request(f"waits {number}", parts, PARAMS))
    free = engine.add(Request("free", engine.prompts.from_parts(["who?"]), PARAMS))
    for _ in range(40):
        engine.step()
    assert free.finished
    assert engine.snapshot().waiting == 12
    engine.tiering.claims.awaits = lambda missing: False
    while engine.has_work:
        engine.step()
    llm.close()
