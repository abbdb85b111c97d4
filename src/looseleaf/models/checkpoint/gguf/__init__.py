"""GGUF files as checkpoints: metadata becomes a folder of JSON files, tensors stay in the file."""
