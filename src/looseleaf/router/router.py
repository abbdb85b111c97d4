"""The order in which replicas are tried for a request.

First come replicas within the load bounds. Among them, the replica that holds most of the request's
tokens is first, then the best by rendezvous hashing. A request without documents, and without an
earlier turn, goes to the least load."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from looseleaf.router.affinity import Affinity
from looseleaf.router.load import LoadLimits, Loads
from looseleaf.router.rendezvous import rendezvous_score


@dataclass(eq=False)
class Router:
    """Chooses replicas by name; ``clock`` returns seconds.

    The latest ``max_conversations`` conversations are kept with their replica."""

    clock: Callable[[], float]
    limits: LoadLimits = field(default_factory=LoadLimits)
    max_conversations: int = 65_536
    _summaries: dict[str, Mapping[str, int]] = field(default_factory=dict)
    _conversations: "OrderedDict[str, str]" = field(default_factory=OrderedDict)
    _turn: int = 0

    def __post_init__(self) -> None:
        self.loads = Loads(self.clock, self.limits)

    def report(self, replica: str, summary: Mapping[str, int]) -> None:
        """Replace the summary of a replica: tokens by the tags of documents that it holds."""
        self._summaries[replica] = summary

    def forget(self, replica: str) -> None:
        """Drop all knowledge of a replica that has left or has lost its cache."""
        self._summaries.pop(replica, None)
        self.loads.forget(replica)

    def order(self, affinity: Affinity, replicas: Sequence[str]) -> list[str]:
        """``replicas`` in the order in which to try them; those above a bound are last."""
        if not replicas:
            return []
        eligible = set(self.loads.eligible(replicas))
        sticky = self._conversations.get(affinity.conversation or "")
        self._turn += 1
        first = self._turn % len(replicas)
        # equal replicas take turns
        turns = [*replicas[first:], *replicas[:first]]

        def rank(replica: str) -> tuple[bool, float, float, float]:
            tokens = float(self.held_tokens(replica, affinity))
            if replica == sticky:
                tokens += affinity.conversation_tokens
            load = self.loads.running(replica) + self.loads.recent(replica) / _RECENT_WEIGHT
            outside = replica not in eligible
            if outside:
                return outside, load, -tokens, 0.0
            return outside, -tokens, -rendezvous_score(replica, affinity.documents), load

        return sorted(turns, key=rank)

    def held_tokens(self, replica: str, affinity: Affinity) -> int:
        """Tokens of the request's documents that a replica reports to hold."""
        summary = self._summaries.get(replica, {})
        return sum(weight for tag, weight in affinity.documents if tag in summary)

    def begin(self, replica: str, affinity: Affinity) -> None:
        """Count a request that is sent to a replica, which keeps its conversation."""
        self.loads.begin(replica)
        if affinity.conversation is not None:
            self._conversations[affinity.conversation] = replica
            self._conversations.move_to_end(affinity.conversation)
            if len(self._conversations) > self.max_conversations:
                self._conversations.popitem(last=False)

    def end(self, replica: str) -> None:
        """Count the end of a request."""
        self.loads.end(replica)


_RECENT_WEIGHT = 1e6
"""Recent requests only decide between replicas with equally many requests in flight."""
