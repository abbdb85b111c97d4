"""The costs of an engine: seconds of steps and loads, bytes of tokens, and a price."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Linear costs of one replica.

    A step takes ``step`` seconds, and more per new token (``prefill``) and per decoded row
    (``row``). A load takes ``load_latency`` and its bytes at ``load_bandwidth``. ``overhead`` is
    the time of a request outside of the engine. With ``cores``, busy replicas share that many
    processors; None gives each its own. ``hourly`` is a replica's price."""

    step: float = 0.008
    prefill: float = 5e-5
    row: float = 1e-4
    overhead: float = 0.003
    step_tokens: int = 8192
    bytes_per_token: int = 131_072
    load_latency: float = 0.002
    load_bandwidth: float = 2.5e9
    cores: int | None = None
    hourly: float = 2.0

    def step_seconds(self, new_tokens: int, rows: int, busy: int) -> float:
        """The duration of a step that begins while ``busy`` replicas compute."""
        share = 1.0 if self.cores is None else max(1.0, busy / self.cores)
        return share * (self.step + self.prefill * new_tokens + self.row * rows)

    def load_seconds(self, tokens: int) -> float:
        """The duration of a load from the shared tier."""
        return self.load_latency + tokens * self.bytes_per_token / self.load_bandwidth
