"""What a server says of its tiers: in answers, and in its metrics. It is started twice on one
folder."""

from pathlib import Path
from typing import Any

import pytest

from tests.server.running import running_server

TEXT = "The boat house of the lake club is kept by Runa Feld. " * 12
DOCUMENTS = [{"id": "club", "text": TEXT}]


def test_a_server_that_starts_again_loads_its_documents_and_says_so(tmp_path: Path) -> None:
    reports: list[dict[str, Any]] = []
    for _ in range(2):
        with running_server("--disk-path", str(tmp_path), "--num-pages", "100") as server:
            answer = server.ask("Who keeps the boat house?", DOCUMENTS)
            reports.append(answer)
            loaded = server.metric("looseleaf_documents_total", source="loaded")
            loads = server.metric("looseleaf_tier_loads_total", tier="disk")
            faults = server.metric("looseleaf_tier_faults_total", tier="disk", kind="damaged")
            assert faults == 0
            assert loads == loaded == len(reports) - 1
            assert server.metric("looseleaf_tier_bytes_per_second", tier="disk") > 0
            for loading in answer["looseleaf"]["loading"]:
                for time, name in (("predicted", "predicted"), ("actual", "seconds")):
                    told = server.metric("looseleaf_loading_seconds_sum", until="load", time=time)
                    assert told == pytest.approx(loading[f"load_{name}"], rel=1e-3)
    first, second = reports
    assert first["choices"] == second["choices"]
    (computed,), (found,) = (r["looseleaf"]["documents"] for r in reports)
    assert (computed["source"], computed["tier"]) == ("computed", None)
    assert (found["source"], found["tier"]) == ("loaded", "disk")
    assert first["looseleaf"]["loading"] == []
    (loading,) = second["looseleaf"]["loading"]
    assert loading["tiers"] == ["disk"] and loading["bytes"] > 0
    assert loading["load_seconds"] > 0 and loading["total_seconds"] >= loading["load_seconds"]
