"""The OpenAI API over HTTP, with documents as part of the request. The only user of pydantic."""
