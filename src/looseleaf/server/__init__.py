"""The APIs of OpenAI and Anthropic over HTTP, with documents as part of the request. The only user of pydantic."""
