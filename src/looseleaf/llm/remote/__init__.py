"""An engine in another process: messages over a socket, and both of their ends."""
