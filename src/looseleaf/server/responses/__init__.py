"""OpenAI's responses: from items to chat requests and back, and the stored responses."""
