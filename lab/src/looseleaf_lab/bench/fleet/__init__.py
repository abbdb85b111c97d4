"""``looseleaf bench fleet``: a simulation of many replicas, and its real small end."""
