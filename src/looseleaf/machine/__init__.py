"""The limits of the machine that runs this process: memory, cores and threads."""
