"""The application of Ray Serve: arguments of ``serve run`` and of YAML files become deployments."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import ray.serve as serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from looseleaf.config import ServerConfig
from looseleaf.config.route import RouteConfig
from looseleaf.errors import InvalidOption
from looseleaf.llm.llm import make_config
from looseleaf.ray.ingress import make_ingress
from looseleaf.ray.replica import EngineReplica
from looseleaf.ray.routing import DocumentRouter
from looseleaf.ray.scaling import queue_and_pages

_ROUTE_ONLY = ("requests_per_minute", "concurrent_requests", "max_body_mib", "registered_mib")
_LOAD_LIMITS = {"load_factor": "factor", "load_slack": "slack", "load_half_life": "half_life"}
"""Fields of `RouteConfig` and those of `LoadLimits`."""
_DEFAULTS: dict[str, Any] = {
    "model": None,
    "replicas": 1,
    "max_replicas": None,
    "ingresses": 1,
    "num_gpus": 0.0,
    "num_cpus": 1.0,
    "ongoing_requests": 32,
    "drain_seconds": 600.0,
}


def app(args: Mapping[str, Any]) -> Any:
    """The application. ``args`` are ``model``, the options below, and any option of ``looseleaf
    serve`` with underscores.

    ``replicas`` engines run, up to ``max_replicas`` by load. Autoscaling aims at
    ``ongoing_requests`` per engine, which takes at most four times as many. An engine has
    ``num_gpus`` and ``num_cpus``. ``ingresses`` speak HTTP. Rate limits hold per ingress. Raises
    InvalidOption."""
    options = {name: _value(value) for name, value in args.items()}
    own = {name: options.pop(name, default) for name, default in _DEFAULTS.items()}
    route = {name: options.pop(name) for name in _ROUTE_ONLY if name in options}
    limits = {name: options.pop(name) for name in _LOAD_LIMITS if name in options}
    names = {field.name for field in fields(ServerConfig)}
    server = {name: options.pop(name) for name in list(options) if name in names}
    if own["max_replicas"] is not None and own["max_replicas"] < own["replicas"]:
        raise InvalidOption("max_replicas is at least replicas: raise it", "max_replicas")
    # checked before any machine starts
    RouteConfig(**route, **limits)
    ServerConfig(**server)
    make_config(options)
    engines = serve.deployment(EngineReplica, name="Engine").options(
        ray_actor_options={"num_gpus": own["num_gpus"], "num_cpus": own["num_cpus"]},
        max_ongoing_requests=4 * own["ongoing_requests"],
        graceful_shutdown_timeout_s=own["drain_seconds"],
        health_check_period_s=5,
        request_router_config=RequestRouterConfig(
            request_router_class=DocumentRouter,
            request_router_kwargs={_LOAD_LIMITS[name]: limits[name] for name in limits},
            request_routing_stats_period_s=1.0,
        ),
        **_scale(own),
    )
    ingress = make_ingress().options(
        num_replicas=own["ingresses"], max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0}
    )
    return ingress.bind(engines.bind(own["model"], server, options), route)


def _scale(own: Mapping[str, Any]) -> dict[str, Any]:
    """A fixed number of replicas, or limits of autoscaling."""
    if own["max_replicas"] is None:
        return {"num_replicas": own["replicas"]}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=own["replicas"],
            max_replicas=own["max_replicas"],
            target_ongoing_requests=own["ongoing_requests"],
            policy=AutoscalingPolicy(policy_function=queue_and_pages),
        )
    }


def _value(value: Any) -> Any:
    """A value of the command line, where all are text: a number or a bool if it reads as one."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
