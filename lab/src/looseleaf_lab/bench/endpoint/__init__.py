"""``bench http``: load for an OpenAI endpoint, from client processes without PyTorch."""
