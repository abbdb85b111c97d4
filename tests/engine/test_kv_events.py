"""A subscriber that replays KV events has the same prefix pages as the pool."""

import msgspec
import pytest
import zmq

from looseleaf import LLM, Document, SamplingParams
from looseleaf.engine.kv_events import KvEvents
from looseleaf.errors import InvalidOption
from looseleaf.kv.keys import SegmentKey

LEAD = "Answer from the documents below, in one sentence."


class Recorder:
    """A publisher that keeps the events, and the mirror of a subscriber."""

    def __init__(self):
        self.events, self.blocks = [], {}

    def publish(self, events):
        self.events += events
        for kind, *fields in events:
            if kind == "AllBlocksCleared":
                self.blocks.clear()
            elif kind == "BlockRemoved":
                for block in fields[0]:
                    del self.blocks[block]
            else:
                blocks, parent, tokens, size, _, medium = fields
                assert medium == "GPU" and len(tokens) == size * len(blocks)
                for number, block in enumerate(blocks):
                    self.blocks[block] = parent, tuple(tokens[number * size : (number + 1) * size])
                    parent = block

    def close(self): ...


@pytest.fixture
def llm(checkpoint):
    engine = LLM(checkpoint(), dtype="float32", device="cpu", num_pages=48)
    yield engine
    engine.close()


def record(llm):
    recorder = Recorder()
    events = KvEvents(recorder, llm.engine.config.cache.page_size)
    llm.engine._events = llm.engine._admission.events = events
    llm.engine.store.on_drop = events.removed
    return recorder


def ask(llm, prompt, **options):
    return llm.generate([prompt], SamplingParams(max_tokens=20, ignore_eos=True), **options)


def chains(recorder):
    """The prefixes from the first token on that the subscriber has, by their last block."""
    prefixes = {}
    for block, (parent, tokens) in recorder.blocks.items():
        prefixes[block] = (*(prefixes[parent] if parent is not None else ()), *tokens)
    return prefixes


def test_a_subscriber_mirrors_the_prefixes_of_the_pool(llm):
    recorder = record(llm)
    for number in range(12):
        ask(llm, [LEAD, Document(f"Document {number} is about rooms. "), f"Question {number}?"])
        ask(llm, f"{LEAD} A prompt without documents, {number}. ")
    assert recorder.events[0] == ["AllBlocksCleared"]
    assert any(event[0] == "BlockRemoved" for event in recorder.events)
    hashes = {int.from_bytes(s.key[:8], "big") for s in llm.engine.store.segments() if s.ready}
    assert recorder.blocks and set(recorder.blocks) <= hashes
    lead = llm.engine.tokenizer.encode(LEAD)
    assert any(prefix == tuple(lead[: len(prefix)]) for prefix in chains(recorder).values())


def test_pages_after_documents_and_of_salted_requests_are_private(llm):
    recorder = record(llm)
    ask(llm, LEAD * 2, salt="tenant")
    ask(llm, [Document("Room nine is blue. "), LEAD * 2])
    assert not recorder.blocks


def test_a_block_is_stored_once():
    recorder = Recorder()
    events = KvEvents(recorder, 2)
    first, second = SegmentKey(b"a" * 32), SegmentKey(b"b" * 32)
    for _ in range(2):
        events.stored(first, None, [1, 2])
        events.stored(second, first, [3, 4])
    events.removed(SegmentKey(b"c" * 32))
    events.flush()
    events.flush()
    assert [event[0] for event in recorder.events] == ["AllBlocksCleared", "BlockStored"]
    assert recorder.events[1][3] == [1, 2, 3, 4] and len(recorder.events[1][1]) == 2
    events.removed(second)
    events.removed(first)
    events.removed(first)
    events.flush()
    assert recorder.events[2][0] == "BlockRemoved" and not recorder.blocks


def test_messages_have_vllms_form(checkpoint, tmp_path):
    endpoint = f"ipc://{tmp_path}/events"
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe(b"")
        subscriber.rcvtimeo = 20_000
        subscriber.connect(endpoint)
        llm = LLM(checkpoint(), dtype="float32", device="cpu", num_pages=48, kv_events=endpoint)
        messages = []
        while not messages:
            ask(llm, LEAD)
            if subscriber.poll(200):
                messages.append(subscriber.recv_multipart())
        llm.close()
    topic, number, payload = messages[0]
    _, events, rank = msgspec.msgpack.decode(payload)
    assert topic == b"" and len(number) == 8 and rank == 0
    assert {event[0] for event in events} <= {"AllBlocksCleared", "BlockStored", "BlockRemoved"}


@pytest.mark.parametrize("options", [{"kv_events": "here"}, {"prefix_caching": False}])
def test_events_without_a_sense_are_refused(checkpoint, options):
    options = {"kv_events": "ipc:///nowhere/at/all", **options}
    with pytest.raises(InvalidOption, match="kv_events"):
        LLM(checkpoint(), dtype="float32", device="cpu", num_pages=48, **options)
