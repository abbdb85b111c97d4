"""Ray Serve's request router by documents: the logic of `looseleaf.router` for one handle.

Ray awaits replicas between the choice and the sending of a request. So a choice counts as load
immediately. Otherwise requests that arrive together would all see replicas without load."""

import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from looseleaf.router import Affinity, LoadLimits, Router

CHOICE_SECONDS = 5.0
"""A choice counts no longer than this, since Ray does not report requests that it drops."""


class DocumentRouter(RequestRouter):  # type: ignore[misc]
    """Ranks replicas by the argument ``affinity``; ``target`` names one replica instead."""

    def initialize_state(self, **limits: Any) -> None:
        """Begin without knowledge; ``limits`` are fields of `LoadLimits`."""
        self._router = Router(time.monotonic, LoadLimits(**limits))
        self._reported: dict[str, Any] = {}
        self._choices: dict[str, tuple[str, float]] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """One rank per replica, the best first."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        self._learn(by_name)
        if pending_request is None:
            return [[by_name[name]] for name in self._router.order(Affinity(), sorted(by_name))]
        target = pending_request.kwargs.get("target")
        if target:
            # of a replica that has left, any other may answer
            return [[by_name[target]]] if target in by_name else [candidate_replicas]
        request = pending_request.metadata.internal_request_id
        self._withdraw(request)
        names = self._router.order(_affinity(pending_request), sorted(by_name))
        if names:
            self._router.loads.begin(names[0])
            self._choices[request] = names[0], time.monotonic()
        return [[by_name[name]] for name in names]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Count a request that was sent."""
        self._withdraw(pending_request.metadata.internal_request_id)
        self._router.begin(replica_id.unique_id, _affinity(pending_request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count the end of a request."""
        self._router.end(replica_id.unique_id)

    def _withdraw(self, request: str) -> None:
        """Take back the choices of one request and of all that are too old."""
        old = time.monotonic() - CHOICE_SECONDS
        for name, (replica, since) in list(self._choices.items()):
            if name == request or since < old:
                del self._choices[name]
                self._router.loads.withdraw(replica)

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


def _affinity(request: PendingRequest) -> Affinity:
    return request.kwargs.get("affinity") or Affinity()
