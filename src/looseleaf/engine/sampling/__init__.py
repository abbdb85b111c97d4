"""From logits to tokens, and from tokens to the end of an output."""

from looseleaf.engine.sampling.batch import SamplingBatch
from looseleaf.engine.sampling.logprobs import TokenLogprob
from looseleaf.engine.sampling.sampler import SampledTokens, Sampler
from looseleaf.engine.sampling.state import SamplingState
from looseleaf.engine.sampling.stopping import Finish, StopChecker

__all__ = [
    "Finish",
    "SampledTokens",
    "Sampler",
    "SamplingBatch",
    "SamplingState",
    "StopChecker",
    "TokenLogprob",
]
