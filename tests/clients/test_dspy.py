"""DSPy through LiteLLM: a bare call, a signature by JSON schema, and reasoning steps."""

from typing import Literal

import dspy
import litellm
import pytest

from tests.clients.expected import ANSWER

QUESTION = "Where is the archive?"


class Place(dspy.Signature):
    """Where a thing is."""

    question: str = dspy.InputField()
    wing: Literal["north", "south"] = dspy.OutputField()
    floor: int = dspy.OutputField()


@pytest.fixture
def lm(server, model):
    # LiteLLM sends schemas to models only of which it knows that they follow them
    known = {"supports_response_schema": True, "litellm_provider": "openai", "mode": "chat"}
    litellm.register_model({f"openai/{model}": known})
    return dspy.LM(
        f"openai/{model}",
        api_base=server.api,
        api_key="none",
        temperature=0,
        max_tokens=300,
        cache=False,
        num_retries=0,
    )


def test_a_language_model_answers(lm):
    assert lm(QUESTION) == [ANSWER]


@pytest.mark.parametrize("module", [dspy.Predict, dspy.ChainOfThought])
@pytest.mark.parametrize("adapter", [dspy.ChatAdapter, dspy.JSONAdapter])
def test_a_signature_is_filled(lm, module, adapter):
    with dspy.context(lm=lm, adapter=adapter()):
        place = module(Place)(question=QUESTION)
    assert place.wing in ("north", "south") and isinstance(place.floor, int)
