"""The endpoints, one file a kind."""
