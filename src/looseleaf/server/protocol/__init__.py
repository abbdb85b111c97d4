"""Pydantic models of request and response bodies; unknown fields and loose types are errors."""
