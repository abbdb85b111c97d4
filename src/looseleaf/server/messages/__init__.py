"""Anthropic's messages: from their requests to chat requests, and from blocks to their answers."""
