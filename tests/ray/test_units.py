"""Parts of the Ray application that need no cluster."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from looseleaf.errors import InvalidOption
from looseleaf.ray import app
from looseleaf.ray.asgi import AsgiApp
from looseleaf.ray.routing import CHOICE_SECONDS, DocumentRouter
from looseleaf.ray.scaling import queue_and_pages
from looseleaf.router import Affinity


def context(requests=0.0, shares=(), least=1, most=10):
    return SimpleNamespace(
        config=SimpleNamespace(target_ongoing_requests=8),
        total_num_requests=requests,
        aggregated_metrics={"pages_in_use": dict(enumerate(shares))},
        capacity_adjusted_min_replicas=least,
        capacity_adjusted_max_replicas=most,
    )


@pytest.mark.parametrize(
    ("state", "number"),
    [
        (context(), 1),
        (context(requests=8), 1),
        (context(requests=17), 3),
        # two replicas whose pages are nearly all in use
        (context(requests=4, shares=(0.95, 0.9)), 3),
        (context(requests=800), 10),
        (context(least=2), 2),
    ],
)
def test_replicas_follow_the_queue_and_the_pages(state, number):
    assert queue_and_pages(state)[0] == number


def test_options_are_checked_before_a_replica_starts():
    bounds = [{"load_half_life": "0"}, {"load_factor": "0.5"}, {"load_slack": "0"}]
    for options in ({"port": "-1"}, {"replicas": "3", "max_replicas": "2"}, *bounds):
        with pytest.raises(InvalidOption):
            app(options)


def test_an_application_is_called_without_a_socket():
    events = []

    async def inner(scope, receive, send):
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                events.append((await receive())["type"])
                await send({"type": f"lifespan.{kind}.complete"})
            return
        message = await receive()
        events.append((scope["path"], scope["query_string"], message["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        # the client leaves
        events.append((await receive())["type"])

    async def run():
        at_work = AsgiApp(inner)
        await at_work.start()
        messages = at_work.call("POST", "/a%20b?c=d", [("X", "y")], b"body")
        kinds = [(await anext(messages))["type"] for _ in range(2)]
        await messages.aclose()
        await at_work.stop()
        return kinds

    assert asyncio.run(run()) == ["http.response.start", "http.response.body"]
    assert events[:2] == ["lifespan.startup", ("/a b", b"c=d", b"body")]
    assert events[-1] == "lifespan.shutdown"


def test_a_reader_that_leaves_a_full_queue_ends_the_call():
    async def inner(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"a", "more_body": True})

    async def run():
        messages = AsgiApp(inner).call("GET", "/", [], b"")
        assert (await anext(messages))["type"] == "http.response.start"
        # the application's turn, in which it fills the queue
        await asyncio.sleep(0)
        closed, _ = await asyncio.wait({asyncio.ensure_future(messages.aclose())}, timeout=5)
        assert closed

    asyncio.run(run())


def test_an_error_of_the_application_is_the_callers():
    async def inner(scope, receive, send):
        raise ValueError(scope["type"])

    async def run():
        at_work = AsgiApp(inner)
        with pytest.raises(ValueError, match="lifespan"):
            await at_work.start()
        with pytest.raises(ValueError, match="http"):
            await anext(at_work.call("GET", "/", [], b""))

    asyncio.run(run())


def replicas(*names):
    return [
        SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats={})
        for name in names
    ]


def test_requests_that_arrive_together_are_shared_before_any_is_sent(monkeypatch):
    """Ray asks for the replicas of several requests before it sends the first."""
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("looseleaf.ray.routing.time", clock)
    router = object.__new__(DocumentRouter)
    router.initialize_state()
    candidates = replicas("a", "b")
    requests = [
        SimpleNamespace(
            kwargs={"affinity": Affinity((("document", 100),))},
            metadata=SimpleNamespace(internal_request_id=str(number)),
        )
        for number in range(8)
    ]

    def choose(request):
        ranks = asyncio.run(router.choose_replicas(candidates, request))
        assert [len(rank) for rank in ranks] == [1, 1]
        return ranks[0][0].replica_id

    chosen = [choose(request) for request in requests]
    names = [replica.unique_id for replica in chosen]
    assert set(names) == {"a", "b"} and max(map(names.count, names)) <= 5
    # a request that is chosen for again counts once
    assert [choose(request).unique_id for request in requests[:1]] == names[:1]

    def running():
        return [router._router.loads.running(name) for name in ("a", "b")]

    assert sum(running()) == 8
    for request, replica in zip(requests[:6], chosen, strict=False):
        router.on_request_routed(request, replica, None)
    assert sum(running()) == 8
    # Ray dropped the last two, and the next choice forgets them
    now[0] += 2 * CHOICE_SECONDS
    choose(requests[6])
    assert sum(running()) == 7
    router.on_request_routed(requests[6], chosen[6], None)
    for replica in chosen[:7]:
        router.on_request_completed(replica, "")
    assert running() == [0, 0]


def manifests():
    import yaml

    folder = Path(__file__).parents[2] / "deploy"
    kube = yaml.safe_load((folder / "kuberay.yaml").read_text())
    return [
        yaml.safe_load((folder / "ray-serve.yaml").read_text()),
        yaml.safe_load(kube["spec"]["serveConfigV2"]),
    ]


@pytest.mark.parametrize("number", [0, 1])
def test_the_manifests_name_an_application_and_its_options(number):
    from ray.serve.schema import ServeDeploySchema

    config = manifests()[number]
    ServeDeploySchema(**config)
    (application,) = config["applications"]
    assert application["import_path"] == "looseleaf.ray:app"
    app(application["args"])


def test_the_drain_of_a_pod_is_longer_than_that_of_its_replica():
    import yaml

    text = (Path(__file__).parents[2] / "deploy" / "kuberay.yaml").read_text()
    (group,) = yaml.safe_load(text)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    seconds = group["template"]["spec"]["terminationGracePeriodSeconds"]
    assert seconds > manifests()[1]["applications"][0]["args"]["drain_seconds"]


def test_options_of_the_engine_are_checked():
    with pytest.raises(InvalidOption, match="num_page"):
        app({"num_page": 3})
