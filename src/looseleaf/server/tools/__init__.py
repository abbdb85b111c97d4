"""Parsers of tool calls in answers, one module per family of models."""
