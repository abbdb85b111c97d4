"""Quality of answers, measured through the public API only."""
