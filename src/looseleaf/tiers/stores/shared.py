"""The tier that several engines share, by the scheme of its URL."""

from looseleaf.tiers.stores.objects import SCHEME, ObjectTier
from looseleaf.tiers.stores.remote import RemoteTier

SharedTier = RemoteTier | ObjectTier


def shared_tier(url: str, timeout: float = 5.0, ttl: float | None = None) -> SharedTier:
    """The tier at ``url``: an object store (``s3://``), else a Redis or Valkey server.

    Raises InvalidOption for an invalid URL, and without the package of its client."""
    if url.startswith(f"{SCHEME}://"):
        return ObjectTier(url, timeout, ttl)
    return RemoteTier(url, timeout, ttl)
