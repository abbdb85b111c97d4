"""The choice of a replica for a request, by documents, conversation and load.

Pure Python without I/O: the proxy, Ray Serve's request router and the simulation share it."""

from looseleaf.router.affinity import Affinity, affinity_of
from looseleaf.router.load import LoadLimits, Loads
from looseleaf.router.rendezvous import rendezvous_score
from looseleaf.router.router import Router
from looseleaf.router.tags import registered_tag, response_tag, text_tag

__all__ = [
    "Affinity",
    "LoadLimits",
    "Loads",
    "Router",
    "affinity_of",
    "registered_tag",
    "rendezvous_score",
    "response_tag",
    "text_tag",
]
