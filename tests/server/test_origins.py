"""Web pages of other origins, other host names, and servers that refuse unknown fields."""

import pytest

from looseleaf.config import ServerConfig
from looseleaf.errors import InvalidOption
from looseleaf.server.service import make_service
from tests.server.live import live_server

PAGE = "https://page.example"
OPTIONS = {
    "cors_origins": (PAGE,),
    "allowed_hosts": ("Box.example",),
    "unknown_fields": "refuse",
}


def test_only_named_origins_and_hosts_are_allowed() -> None:
    with live_server(config=OPTIONS) as live:
        wish = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        preflight = live.client.options("/v1/chat/completions", headers=wish)
        assert preflight.headers["access-control-allow-origin"] == PAGE
        answer = live.client.get("/v1/models", headers={"Origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == PAGE
        other = live.client.get("/v1/models", headers={"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers
        hosts = {"box.example": 200, "box.example:80": 200, "other.example": 403}
        for host, status in hosts.items():
            assert live.client.get("/v1/models", headers={"Host": host}).status_code == status
        refused = live.chat(tempreature=1)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tempreature")


def test_a_certificate_that_is_not_there_is_refused_before_the_model_loads() -> None:
    with pytest.raises(InvalidOption, match="tls_key"):
        ServerConfig(tls_key="key.pem")
    with pytest.raises(InvalidOption, match="nowhere"):
        make_service(None, ServerConfig(tls_cert="nowhere.pem"))
