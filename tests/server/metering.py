"""What a server's metrics say, for tests that count."""

from tests.server.live import Live


def counted(live: Live) -> dict[str, float]:
    """Every sample by its name and labels, as they are written."""
    text = live.client.get("/metrics").text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}
