"""lm-eval's API models: likelihoods of continuations and generations, over both endpoints."""

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from tests.clients.expected import ANSWER

UNTIL = {"until": ["\n"], "max_gen_toks": 16, "temperature": 0}


def requests(kind, arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=number)
        for number, each in enumerate(arguments)
    ]


@pytest.fixture(params=["remote", "remote_texts"])
def completions(server, model, request):
    return LocalCompletionsAPI(
        model=model,
        base_url=f"{server.api}/completions",
        tokenizer_backend="remote",
        tokenized_requests=request.param == "remote",
        max_length=512,
    )


def test_the_likeliest_continuation_wins(completions):
    pairs = [("The archive is in the north", each) for each in (" wing", " tower", " the")]
    scores = completions.loglikelihood(requests("loglikelihood", pairs))
    values = [value for value, _ in scores]
    assert max(values) == values[0] > -1
    assert [greedy for _, greedy in scores] == [True, False, False]


def test_a_batch_has_the_scores_of_its_members(server, model):
    def scores(batch_size):
        lm = LocalCompletionsAPI(
            model=model,
            base_url=f"{server.api}/completions",
            tokenizer_backend="remote",
            batch_size=batch_size,
            max_length=512,
        )
        pairs = [("The archive is", each) for each in (" in", " the north", " wing", ".")]
        return [value for value, _ in lm.loglikelihood(requests("loglikelihood", pairs))]

    assert scores(4) == pytest.approx(scores(1), abs=1e-3)


def test_a_text_has_a_rolling_likelihood(completions):
    (score,) = completions.loglikelihood_rolling(
        requests("loglikelihood_rolling", [("The archive is in the north wing.",)])
    )
    assert score < 0


def test_a_text_is_generated(completions):
    (text,) = completions.generate_until(requests("generate_until", [("The", UNTIL)]))
    assert text == ANSWER.removeprefix("The")


@pytest.mark.parametrize("concurrent", [1, 4])
def test_a_chat_is_generated(server, model, concurrent):
    lm = LocalChatCompletion(
        model=model, base_url=f"{server.api}/chat/completions", num_concurrent=concurrent
    )
    prompt = lm.apply_chat_template([{"role": "user", "content": "Where is the archive?"}])
    texts = lm.generate_until(requests("generate_until", [(prompt, UNTIL)] * 3))
    assert texts == [ANSWER] * 3
