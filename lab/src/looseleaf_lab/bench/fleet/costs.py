"""The costs of an engine: seconds of steps and loads, bytes of tokens, and a price."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Linear costs of one replica.

    A step takes ``step`` seconds, and more per new token (``prefill``), per prompt with new tokens
    (``prompt``) and per decoded row (``row``). A load takes ``load_latency`` and its bytes at
    ``load_bandwidth``. A request spends ``overhead`` outside of the engine, as if before its
    admission. Its first token arrives ``first_delay`` later than that says, earlier if negative,
    since parts of the overhead follow the token or overlap with steps. With ``cores``, all that is
    busy shares that many processors; None gives each its own. ``hourly`` is a replica's price."""

    step: float = 0.008
    prefill: float = 5e-5
    row: float = 1e-4
    prompt: float = 0.0
    overhead: float = 0.003
    first_delay: float = 0.0
    step_tokens: int = 8192
    bytes_per_token: int = 131_072
    load_latency: float = 0.002
    load_bandwidth: float = 2.5e9
    cores: int | None = None
    hourly: float = 2.0

    def step_seconds(self, new_tokens: int, prompts: int, rows: int, busy: int) -> float:
        """The duration of a step that begins while ``busy`` steps and requests need a core.

        ``rows`` include the rows of ``prompts``."""
        seconds = self.step + self.prefill * new_tokens + self.prompt * prompts + self.row * rows
        return self.share(busy) * seconds

    def share(self, busy: int) -> float:
        """The slow-down while ``busy`` steps and requests need a core."""
        return 1.0 if self.cores is None else max(1.0, busy / self.cores)

    def load_seconds(self, tokens: int) -> float:
        """The duration of a load from the shared tier."""
        return self.load_latency + tokens * self.bytes_per_token / self.load_bandwidth
