"""The engine: it turns requests into sequences, batches and steps. It uses no HTTP and no
processes."""
