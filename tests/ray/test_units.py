"""Parts of the Ray application that need no cluster."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from looseleaf.errors import InvalidOption
from looseleaf.ray import app
from looseleaf.ray.asgi import AsgiApp
from looseleaf.ray.scaling import queue_and_pages


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
    for options in ({"port": "-1"}, {"replicas": "3", "max_replicas": "2"}):
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
