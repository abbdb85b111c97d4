"""The engine on a GPU answers as it does on the CPU, and keeps its laws there."""

import threading
from dataclasses import replace

import pytest
import torch

from looseleaf import LLM, Document, SamplingParams
from looseleaf.engine.runner.runner import Runner
from looseleaf.errors import EngineClosed
from tests.checkpoints import FAMILIES, make_checkpoint

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)

PROMPTS = [
    [
        "Notes on a house. ",
        Document("Mira Tolland keeps the keys of the archive. " * 2, name="keys"),
        Document("The archive stands in Quorin, behind the old mill. ", name="place"),
        "Who keeps the keys?",
    ],
    [
        "Notes on a house. ",
        Document("The archive stands in Quorin, behind the old mill. ", name="place"),
        Document("Mira Tolland keeps the keys of the archive. " * 2, name="keys"),
        "Where does the archive stand?",
    ],
    "A plain prompt, without any document.",
]


def _logprobs(folder, dtype, **options):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
    llm = LLM(folder, dtype=dtype, num_pages=128, **options)
    outputs = llm.generate(PROMPTS, params)
    llm.engine.check()
    return [[entry[0] for entry in output.outputs[0].logprobs] for output in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_answers_and_logprobs_are_those_of_the_cpu(tmp_path, family):
    folder = make_checkpoint(tmp_path, family)
    on_gpu = _logprobs(folder, "float32", device="cuda")
    on_cpu = _logprobs(folder, "float32", device="cpu")
    for gpu, cpu in zip(on_gpu, on_cpu, strict=True):
        assert [entry.token_id for entry in gpu] == [entry.token_id for entry in cpu]
        logprobs = torch.tensor([entry.logprob for entry in gpu])
        reference = torch.tensor([entry.logprob for entry in cpu])
        assert (logprobs - reference).abs().max() < 1e-3


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_bf16_answers_do_not_depend_on_grouping(tmp_path, page_size):
    folder = make_checkpoint(tmp_path, "llama")
    grouped = _logprobs(folder, "bfloat16", device="cuda", page_size=page_size)
    alone = _logprobs(folder, "bfloat16", device="cuda", page_size=page_size, grouping=False)
    for entries, other in zip(grouped, alone, strict=True):
        # the first token of each answer saw the same prompt, whatever came of the ones before
        assert abs(entries[0].logprob - other[0].logprob) < 0.1


def test_bf16_documents_are_reused_in_any_order(tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    llm = LLM(folder, dtype="bfloat16", device="cuda", num_pages=128)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    llm.generate(PROMPTS[:1], params)
    (second,) = llm.generate(PROMPTS[1:2], params)
    assert second.reuse.document_tokens_computed == 0
    llm.engine.check()


@pytest.mark.parametrize(
    "family", ["llama", "phi", "qwen3", "smollm3", "gemma3_text", "gpt_oss", "ministral3"]
)
def test_tokens_are_the_same_with_graphs_and_without(tmp_path, family):
    folder = make_checkpoint(tmp_path, family)
    params = [SamplingParams(max_tokens=40, seed=n, ignore_eos=True) for n in range(len(PROMPTS))]
    answers = []
    for cuda_graphs in (True, False):
        llm = LLM(folder, dtype="float32", device="cuda", num_pages=128, cuda_graphs=cuda_graphs)
        answers.append([output.token_ids for output in llm.generate(PROMPTS, params)])
        llm.engine.check()
        graphs = llm.engine.runner.graphs
        assert (graphs is not None) == cuda_graphs
        # all steps have few rows, and most were launched before the tokens they read were known
        assert graphs is None or graphs.replays == llm.engine.counters.steps
    assert answers[0] == answers[1]


@pytest.mark.parametrize("late", [False, True])
def test_steps_that_fail_together_are_computed_alone_with_tokens_on_their_way(
    tmp_path, monkeypatch, late
):
    """A step is launched before the tokens that it reads have arrived, also request by request."""
    folder = make_checkpoint(tmp_path, "llama")
    params = [SamplingParams(max_tokens=20, seed=n, ignore_eos=True) for n in range(len(PROMPTS))]
    llm = LLM(folder, dtype="float32", device="cuda", num_pages=128)
    right = [output.token_ids for output in llm.generate(PROMPTS, params)]
    run, broken = Runner.run, []

    def planted(runner, work, previous=None):
        each = {s.request_id for s in (*work.decode, *(chunk.sequence for chunk in work.chunks))}
        if len(each) == 1:
            return run(runner, work, previous)
        broken.append(previous is not None)
        if late:
            run(runner, work, previous)
        raise RuntimeError("planted")

    monkeypatch.setattr(Runner, "run", planted)
    assert [output.token_ids for output in llm.generate(PROMPTS, params)] == right
    assert broken.count(True) > 10
    llm.engine.check()


def test_a_batch_invariant_engine_gives_the_same_bits_grouped_or_not(tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    options = {"device": "cuda", "batch_invariant": True}
    grouped = _logprobs(folder, "bfloat16", **options)
    assert grouped == _logprobs(folder, "bfloat16", grouping=False, **options)


def test_preemption_while_graphs_run_changes_no_token(tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    params = [SamplingParams(max_tokens=60, seed=n, ignore_eos=True) for n in range(9)]
    answers = []
    for num_pages in (128, 26):
        llm = LLM(folder, dtype="float32", device="cuda", num_pages=num_pages)
        answers.append([output.token_ids for output in llm.generate(PROMPTS * 3, params)])
        llm.engine.check()
        assert (llm.engine.counters.preemptions > 0) == (num_pages == 26)
    assert answers[0] == answers[1]


def test_an_output_that_ends_unforeseen_takes_no_token_too_many(tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    llm = LLM(folder, dtype="float32", device="cuda", num_pages=128)
    params = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    (whole,) = llm.generate([PROMPTS[0]], params)
    stop = whole.token_ids[11]
    first = whole.token_ids.index(stop)
    (ended,) = llm.generate([PROMPTS[0]], replace(params, stop_token_ids=[stop]))
    assert ended.token_ids == whole.token_ids[: first + 1]
    assert ended.outputs[0].stop_reason == stop
    llm.engine.check()
    assert not llm.engine.has_work


def test_warming_up_captures_what_later_steps_replay(tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    llm = LLM(folder, dtype="bfloat16", device="cuda", num_pages=256, max_num_seqs=16)
    reports = []
    llm.engine.runner.warm_up(lambda *report: reports.append(report))
    assert reports[0] == ("kernels", 0, 1)
    assert reports[-1][1] == reports[-1][2]
    captured = llm.engine.runner.graphs.num_captured
    llm.generate(PROMPTS * 3, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert llm.engine.runner.graphs.replays == llm.engine.counters.steps
    assert captured > 0


def test_graphs_are_captured_while_another_thread_waits_for_the_device(tmp_path):
    """As the threads do that bring documents from the tiers."""
    folder = make_checkpoint(tmp_path, "llama")
    llm = LLM(folder, dtype="bfloat16", device="cuda", num_pages=256, max_num_seqs=16)
    ended, waits, errors = threading.Event(), [], []

    def wait_again_and_again():
        # of usual priority there are few streams, and a capture may have been given the same
        stream, event = torch.cuda.Stream(priority=-1), torch.cuda.Event()
        try:
            while not ended.is_set():
                event.record(stream)
                event.synchronize()
                waits.append(1)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=wait_again_and_again)
    thread.start()
    try:
        llm.engine.runner.warm_up()
    finally:
        ended.set()
        thread.join()
    assert not errors
    assert len(waits) > 100


@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_of_e4m3_answer_as_on_the_cpu(tmp_path, page_size):
    folder = make_checkpoint(tmp_path, "llama")
    options = {"kv_dtype": "fp8", "page_size": page_size}
    on_gpu = _logprobs(folder, "float32", device="cuda", **options)
    on_cpu = _logprobs(folder, "float32", device="cpu", **options)
    for gpu, cpu in zip(on_gpu, on_cpu, strict=True):
        # a last bit of a key decides which of two numbers of e4m3 it becomes
        assert abs(gpu[0].logprob - cpu[0].logprob) < 0.05


def test_a_prompt_in_chunks_is_as_one_that_is_computed_whole(tmp_path):
    """The last layer computes the rows that are asked for: none, of chunks that end no prompt."""
    folder = make_checkpoint(tmp_path, "llama")
    whole = _logprobs(folder, "float32", device="cuda", cuda_graphs=False)
    options = {"max_num_batched_tokens": 40, "max_num_seqs": 4, "cuda_graphs": False}
    chunked = _logprobs(folder, "float32", device="cuda", **options)
    for entries, other in zip(whole, chunked, strict=True):
        assert [entry.token_id for entry in entries] == [entry.token_id for entry in other]
        assert max(abs(a.logprob - b.logprob) for a, b in zip(entries, other, strict=True)) < 1e-3


def test_an_engine_that_is_closed_gives_its_pages_back_while_it_is_held(tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    llm = LLM(folder, dtype="bfloat16", device="cuda", num_pages=20_000)
    llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=4))
    size, before = llm.engine.runner.pool.kv.nbytes, torch.cuda.memory_allocated()
    llm.close()
    assert before - torch.cuda.memory_allocated() >= size > 1 << 20
    with pytest.raises(EngineClosed):
        llm.generate(PROMPTS)
    with pytest.raises(EngineClosed):
        llm.engine.step()


def test_pages_that_a_tier_may_still_write_to_stay_with_a_closed_engine(tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    llm = LLM(folder, dtype="bfloat16", device="cuda", num_pages=2_000, host_gib=0.1)
    llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=4))
    llm.close()
    assert llm.engine.runner.pool.kv.untyped_storage().nbytes() > 0
