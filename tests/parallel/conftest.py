"""Checkpoints of every family, as for the engine's tests."""

from tests.engine.conftest import checkpoint

__all__ = ["checkpoint"]
