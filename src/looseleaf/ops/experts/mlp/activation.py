"""The activations of experts: a name, or a clamped SwiGLU with its numbers."""

from typing import NamedTuple


class ClampedSwiglu(NamedTuple):
    """``gate * sigmoid(alpha * gate) * (up + 1)`` (GPT-OSS).

    ``gate`` is at most ``limit``, ``up`` between ``limit`` and its negative."""

    alpha: float = 1.702
    limit: float = 7.0


Activation = str | ClampedSwiglu
"""The name of the activation of ``gate``, which is multiplied by ``up``; or both together."""
