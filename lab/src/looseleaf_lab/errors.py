"""The errors of measurements, below the tree of the product's errors."""

from looseleaf.errors import LooseleafError

INSTALL = "run pip install ./lab in a checkout of Looseleaf"
"""The advice of a message about a missing package of the lab."""


class BenchmarkRefused(LooseleafError):
    """An answer that was to be timed is wrong, so its speed means nothing."""


class EvaluationFailed(LooseleafError):
    """A process that answers an evaluation's questions ended by itself."""


class EndpointFailed(LooseleafError):
    """A server that is evaluated did not answer, or not as the OpenAI API does."""
