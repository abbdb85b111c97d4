"""The reference checkpoints and their tokenizer, as files."""
