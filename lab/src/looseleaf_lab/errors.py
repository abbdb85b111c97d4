"""The errors of measurements, below the tree of the product's errors."""

from looseleaf.errors import LooseleafError


class BenchmarkRefused(LooseleafError):
    """An answer that was to be timed is wrong, so its speed means nothing."""


class EvaluationFailed(LooseleafError):
    """A process that answers an evaluation's questions ended by itself."""


class EndpointFailed(LooseleafError):
    """A server that is evaluated did not answer, or not as the OpenAI API does."""
