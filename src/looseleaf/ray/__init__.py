"""Looseleaf on Ray Serve: replicas of the engine behind one ingress that speaks the HTTP API.

``serve run looseleaf.ray:app model=FOLDER`` starts both. A request router sends each request to the
replica that holds its documents. Needs ``looseleaf[ray]``."""

from looseleaf.ray.application import app

__all__ = ["app"]
