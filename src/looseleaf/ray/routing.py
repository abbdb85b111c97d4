"""Ray Serve's request router by documents: the logic of `looseleaf.router` for one handle."""

import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from looseleaf.router import Affinity, LoadLimits, Router


class DocumentRouter(RequestRouter):  # type: ignore[misc]
    """Ranks replicas by the argument ``affinity``; ``target`` names one replica instead."""

    def initialize_state(self, **limits: Any) -> None:
        """Begin without knowledge; ``limits`` are fields of `LoadLimits`."""
        self._router = Router(time.monotonic, LoadLimits(**limits))
        self._reported: dict[str, Any] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """One rank per replica, the best first."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        self._learn(by_name)
        fields = pending_request.kwargs if pending_request is not None else {}
        target = fields.get("target")
        if target:
            # of a replica that has left, any other may answer
            return [[by_name[target]]] if target in by_name else [candidate_replicas]
        affinity = fields.get("affinity") or Affinity()
        return [[by_name[name]] for name in self._router.order(affinity, sorted(by_name))]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Count a request that was sent."""
        affinity = pending_request.kwargs.get("affinity") or Affinity()
        self._router.begin(replica_id.unique_id, affinity)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count the end of a request."""
        self._router.end(replica_id.unique_id)

    def _learn(self, replicas: dict[str, RunningReplica]) -> None:
        for name in self._reported.keys() - replicas.keys():
            del self._reported[name]
            self._router.forget(name)
        for name, replica in replicas.items():
            stats = replica.routing_stats or {}
            if stats.get("version") != self._reported.get(name):
                self._reported[name] = stats.get("version")
                self._router.report(name, stats.get("documents", {}))
            self._reported.setdefault(name, None)
