"""An engine in a process that was forked from its own: refused in words, and no end that waits for
threads which are not there."""

import os
import subprocess
import sys

import pytest

BEGIN = """
import asyncio, os, signal, sys, threading
from looseleaf import LLM, AsyncLLM, Document, SamplingParams
from looseleaf.errors import EngineClosed

params = SamplingParams(temperature=0, max_tokens=4)
question = [Document("The archive is in the north wing."), "Where is the archive?"]

async def answer(engine):
    async for output in engine.generate(question, params):
        pass
    return output.text

def forked(work):
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # whoever hangs is killed
        work()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def refuses(work):
    try:
        work()
    except EngineClosed as error:
        assert "forked" in str(error)
    else:
        sys.exit(7)
"""
OFFLINE = """
llm = LLM(num_pages=200, host_gib=0.01)
before = llm.generate([question], params)[0].text
with llm._lock:  # as it is while another thread computes
    assert forked(lambda: None) == 0
    assert forked(lambda: refuses(lambda: llm.generate([question], params))) == 0
    assert forked(llm.close) == 0
assert llm.generate([question], params)[0].text == before
"""
ASYNC = """
llm = AsyncLLM(num_pages=200, host_gib=0.01)
before = asyncio.run(answer(llm))
with llm._worker._lock:
    assert forked(lambda: None) == 0
    assert forked(lambda: refuses(lambda: asyncio.run(answer(llm)))) == 0
    assert forked(lambda: sys.exit(llm.is_open)) == 0
    assert forked(llm.close) == 0
assert asyncio.run(answer(llm)) == before
"""
ITS_OWN = """
llm = LLM(num_pages=200)
before = llm.generate([question], params)[0].text

def same():
    own = LLM(num_pages=200)
    sys.exit(own.generate([question], params)[0].text != before)

assert forked(same) == 0
"""


@pytest.mark.parametrize("script", [OFFLINE + ITS_OWN, ASYNC], ids=["LLM", "AsyncLLM"])
def test_a_forked_process_has_no_use_of_the_engine_and_ends(script: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BEGIN + script],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
