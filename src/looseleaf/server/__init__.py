"""OpenAI's and Anthropic's APIs over HTTP, with documents. The only user of pydantic."""
