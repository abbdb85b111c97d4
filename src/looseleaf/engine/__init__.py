"""Requests to sequences to batches to steps: scheduling, documents, sampling, `LLM` and `AsyncLLM`.

Knows no HTTP and no process model."""
