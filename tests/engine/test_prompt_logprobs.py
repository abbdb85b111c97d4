"""Log-probabilities of prompt tokens are those of the model, however the prompt was computed."""

import pytest
import torch
from torch import Tensor

from looseleaf import LLM, Document, Fuse, SamplingParams
from looseleaf.engine.prompt_logprobs import ROWS_AT_ONCE
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.engine.sampling.sampler import Sampler
from looseleaf.errors import InvalidRequest, LooseleafError
from looseleaf.prompt.request import Prompt
from tests.engine.harness import Folder, assert_idle, document, make_llm, words
from tests.engine.oracle import dense_logits
from tests.engine.test_law_exact import transformers_logits

TEXT = words(4, 75)
MIXED = [words(1, 19), document(1, 23), words(2, 17), document(2, 20), words(3, 21)]
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=2)
CLOSE = 2e-4


@pytest.fixture(scope="module")
def llm(checkpoint: Folder) -> LLM:
    return make_llm(checkpoint())


def ask(llm: LLM, prompt: Prompt, params: SamplingParams = SCORED) -> RequestOutput:
    (output,) = llm.generate([prompt], params)
    assert_idle(llm)
    return output


def scores(output: RequestOutput) -> list[float | None]:
    assert output.prompt_logprobs is not None
    return [None if entry is None else entry[0].logprob for entry in output.prompt_logprobs]


def same(first: list[float | None], second: list[float | None]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(a is b if a is None or b is None else abs(a - b) <= CLOSE for a, b in pairs)


def expected(logits: Tensor, token_ids: list[int]) -> list[float]:
    """The log-probability of every token but the first, from the logits of those before it."""
    logprobs = logits.float().log_softmax(-1)[: len(token_ids) - 1]
    return logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 17, "max_num_seqs": 4}])
def test_scores_are_those_of_transformers_chunked_or_not_cached_or_not(
    checkpoint: Folder, options: dict[str, int]
) -> None:
    llm = make_llm(checkpoint(), **options)
    outputs = [ask(llm, TEXT) for _ in range(2)]
    token_ids = [*outputs[0].prompt_token_ids]
    logits = transformers_logits("llama", "default", [*token_ids, 0], len(token_ids))
    for output in outputs:
        assert same(scores(output), [None, *expected(logits, token_ids)])
        assert output.prompt_logprobs is not None
        top = logits.log_softmax(-1).topk(2).indices.tolist()
        for entry, likeliest in zip(output.prompt_logprobs[1:], top, strict=False):
            assert entry is not None
            assert {t.token_id for t in entry if t.rank <= 2} == {*likeliest}


def test_long_prompts_are_scored_a_few_rows_at_a_time(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sizes = llm.engine.runner.model, list[int]()
    project = model.logits

    def watched(hidden: Tensor) -> Tensor:
        sizes.append(len(hidden))
        return project(hidden)

    monkeypatch.setattr(model, "logits", watched)
    output = ask(llm, words(9, 200))
    assert max(sizes) <= ROWS_AT_ONCE < sum(sizes)
    assert None not in scores(output)[1:]


def test_tokens_after_text_are_scored_and_tokens_after_a_documents_are_not(llm: LLM) -> None:
    parts = llm.engine.prompts.from_parts(MIXED)
    token_ids = [token for part in parts for token in part.tokens]
    wanted: list[float | None] = [
        None,
        *expected(dense_logits(llm.engine.runner.model, parts, []), token_ids),
    ]
    start = 0
    for number, part in enumerate(parts):
        for index in range(start, start + len(part.tokens)) if number % 2 else ():
            if index + 1 < len(wanted):
                wanted[index + 1] = None
        start += len(part.tokens)
    assert None in wanted[1:]
    for _ in range(2):
        assert same(scores(ask(llm, MIXED)), wanted)


@pytest.mark.parametrize("fuse", [Fuse("question", ratio=0.3), Fuse("all"), Fuse("ape")])
def test_a_policy_scores_the_same_chunked_or_not_and_cached_or_not(
    checkpoint: Folder, llm: LLM, fuse: Fuse
) -> None:
    prompt = [MIXED[0], MIXED[1], MIXED[3], MIXED[4]]
    chunked = make_llm(checkpoint(), max_num_batched_tokens=17, max_num_seqs=4)
    runs = [
        scores(engine.generate([prompt], SCORED, fuse=fuse)[0]) for engine in (llm, llm, chunked)
    ]
    assert same(runs[0], runs[1]) and same(runs[0], runs[2])
    assert sum(score is not None for score in runs[0]) > 30


def test_a_start_leaves_earlier_pages_to_the_prefix_cache(llm: LLM) -> None:
    whole = scores(ask(llm, TEXT))
    late = ask(llm, TEXT, SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=50))
    assert same(scores(late), [None] * 50 + whole[50:])
    assert late.reuse.text_tokens_cached == 48
    assert ask(llm, TEXT).reuse.text_tokens_cached == 0
    assert ask(llm, TEXT, SamplingParams(max_tokens=1)).reuse.text_tokens_cached == 64


def test_no_hidden_token_is_drawn_for_max_tokens_0(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a token is drawn")

    monkeypatch.setattr(Sampler, "sample", refuse)
    before = llm.engine.counters.output_tokens
    output = ask(llm, MIXED, SamplingParams(max_tokens=0, n=2))
    assert [(o.token_ids, o.text, o.finish_reason) for o in output.outputs] == [
        ((), "", "length")
    ] * 2
    assert output.prompt_logprobs is None and llm.engine.counters.output_tokens == before
    # the prompt may fill the context
    whole = [5] * llm.engine.max_model_len
    assert ask(llm, [whole], SamplingParams(max_tokens=0)).finished
    monkeypatch.undo()
    with pytest.raises(LooseleafError, match="context holds"):
        ask(llm, [whole], SamplingParams(max_tokens=1))


def test_prompt_scores_come_beside_an_answer_and_its_own(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=0, ignore_eos=True)
    plain = ask(llm, MIXED, params)
    output = ask(llm, MIXED, SamplingParams(**{**vars(params), "prompt_logprobs": 0}))
    assert output.token_ids == plain.token_ids
    assert same(scores(output), scores(ask(llm, MIXED)))


@pytest.mark.parametrize("fuse", [None, Fuse("question", ratio=0.1), Fuse("links", ratio=0.3)])
def test_the_score_of_an_answer_is_what_it_was_generated_with(llm: LLM, fuse: Fuse | None) -> None:
    """So the answer takes no part in the choice of tokens that are computed again."""
    prompt = [words(1, 9), *(document(seed, 50) for seed in (1, 2, 3)), words(2, 9)]
    params = SamplingParams(max_tokens=40, seed=3, logprobs=0, ignore_eos=True)
    (output,) = llm.generate([prompt], params, fuse=fuse)
    answer = output.outputs[0]
    assert answer.logprobs is not None
    (score,) = llm.score([prompt], [[*answer.token_ids]], fuse=fuse)
    assert_idle(llm)
    assert score.token_ids == answer.token_ids
    assert same([*score.logprobs], [entry[0].logprob for entry in answer.logprobs])
    assert score.total == pytest.approx(answer.cumulative_logprob, abs=1e-3)


def test_one_prompt_has_several_candidates_and_the_greedy_one_says_so(llm: LLM) -> None:
    greedy = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    (output,) = llm.generate([MIXED], greedy)
    candidates = [[*output.token_ids], "some text"]
    scored = llm.score([MIXED], candidates)
    assert [score.is_greedy for score in scored] == [True, False]
    alone = [llm.score([MIXED], [candidate])[0] for candidate in candidates]
    for first, second in zip(scored, alone, strict=True):
        assert same([*first.logprobs], [*second.logprobs])


def test_scores_survive_a_preemption(checkpoint: Folder) -> None:
    tight = make_llm(checkpoint(), num_pages=13, max_model_len=192)
    params = SamplingParams(max_tokens=60, seed=1, prompt_logprobs=0, ignore_eos=True)
    prompts = [words(seed, 60) for seed in (21, 22, 23)]
    outputs = tight.generate(prompts, params)
    assert any(output.reuse.preempted_tokens for output in outputs)
    roomy = make_llm(checkpoint(), num_pages=96)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert same(scores(output), scores(ask(roomy, prompt)))


def test_wrong_scoring_requests_are_refused(llm: LLM) -> None:
    for arguments, message in (
        ((TEXT, ""), "empty"),
        (([TEXT, TEXT], ["a", "b", "c"]), "2 prompts but 3 continuations"),
        ((TEXT, [1, 2]), "list of continuations"),
        (([Document("x"), "y"], "z"), "list of prompts"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            llm.score(*arguments)  # type: ignore[arg-type]
