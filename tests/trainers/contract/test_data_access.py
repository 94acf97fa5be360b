"""The check that the hub or a proxy answers, and the sentence for an address that is no URL."""

from __future__ import annotations

import socket

import pytest

from trainers.contract import data_access, environ

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in (*PROXIES, *map(str.upper, PROXIES), "HF_HUB_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("scheme", ["http://", ""])
@pytest.mark.parametrize("name", ["https_proxy", "HTTPS_PROXY", "all_proxy"])
def test_the_hub_is_reached_through_a_proxy_which_a_training_inherits(name, scheme, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv(name, f"{scheme}127.0.0.1:{proxy.getsockname()[1]}")
        assert data_access.hub_problem() == ""
        assert name in environ.inherited()
    problem = data_access.hub_problem()
    assert "127.0.0.1 does not answer" in problem
    assert "for a new run, set data.path" in problem, "a run cannot change from the hub to a mirror"


@pytest.mark.parametrize("address", ["http://ann:pa/ss@host", "http://[ann:pass", "http://:pass@"])
def test_an_address_that_is_no_url_is_a_sentence_without_its_password(address, monkeypatch):
    monkeypatch.setenv("https_proxy", address)
    found = data_access.hub_problem()
    assert "does not answer, so HuggingFaceFW" in found
    assert "pa" not in found.replace("data.path (--local-path)", "")
