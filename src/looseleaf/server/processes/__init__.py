"""A server of several processes: one for the engine, one or more for HTTP, and their parent."""
