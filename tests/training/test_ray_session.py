"""The connection of a run to Ray: which address is taken, and the errors when nothing answers there."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys

import pytest
import ray

from raylane import _ray
from raylane.core.process.reachable import check_reachable
from raylane.errors import ConfigError
from raylane.training.config.schema import ClusterConfig
from raylane.training.run import ray_session

CONNECT = """
import sys
import ray
from raylane.errors import ConfigError
from raylane.training.run import ray_session
from raylane.training.config.schema import ClusterConfig
try:
    with ray_session.connect(ClusterConfig(address=sys.argv[1] or None)):
        print("connected to", ray.get_runtime_context().gcs_address)
except ConfigError as error:
    print(error)
assert not ray.is_initialized()
"""


def connect_in_a_process(address: str | None, variable: str | None) -> str:
    """Connect in a process of its own, because this one may have a Ray already; return what the process prints."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    if variable is not None:
        environment["RAY_ADDRESS"] = variable
    command = [sys.executable, "-c", CONNECT, address or ""]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("source", ["RAY_ADDRESS", "cluster.address"])
def test_connect_to_a_closed_port_names_source_and_remedy(source):
    address = closed_port()
    by_key = source == "cluster.address"
    said = connect_in_a_process(address if by_key else None, None if by_key else address)
    assert f"the Ray cluster at {source}={address} cannot be reached" in said
    assert f"correct {source}" in said


@pytest.mark.slow
def test_connect_prefers_the_key_to_the_variable(ray_session):
    address = ray.get_runtime_context().gcs_address
    assert connect_in_a_process(address, closed_port()) == f"connected to {address}\n"


def test_connect_to_a_ray_client_address_is_refused(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    told = r"cluster\.address=ray://head:10001 is the address of a Ray client server.*ray job submit"
    with pytest.raises(ConfigError, match=told), ray_session.connect(ClusterConfig(address="ray://head:10001")):
        pass


def test_connect_translates_the_errors_of_ray(monkeypatch):
    def init(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    told = r"the Ray cluster at cluster\.address=auto cannot be reached: Could not find any.*Start it.*set it to local"
    with pytest.raises(ConfigError, match=told), ray_session.connect(ClusterConfig(address="auto")):
        pass


def test_check_tells_a_missing_token_from_a_wrong_one(ray_session):
    address = ray.get_runtime_context().gcs_address
    headers = _ray.token_headers()
    check_reachable(address, headers)
    if tuple(map(int, ray.__version__.split(".")[:2])) < (2, 59):
        assert not headers
        check_reachable(address)
        return
    assert list(headers) == ["authorization"]  # a Ray that a program starts has a token since 2.59
    with pytest.raises(PermissionError, match=r"has no token\. Set RAY_AUTH_MODE=token, and"):
        check_reachable(address)
    for token in ("wrong", "wrong" * 100):
        with pytest.raises(PermissionError, match=r"has another token than that of the cluster\. Set RAY_AUTH"):
            check_reachable(address, {"authorization": f"Bearer {token}"})


NO_TOKEN = ray.exceptions.AuthenticationError("no token was found.")
NO_HOME = FileNotFoundError(2, "No such file", "/home/x/.ray")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (NO_TOKEN, r"reached: no token was found\. Set RAY_AUTH_MODE.* of the cluster$"),
        (NO_HOME, r"^Ray cannot save its token: .*/\.ray'\. Set RAY_AUTH_TOKEN"),
    ],
)
def test_connect_says_what_to_do_about_a_token(error, told, monkeypatch):
    notices = logging.getLogger(f"{_ray.AUTHENTICATION_LOGGER}.authentication_token_setup")
    heard = []

    def init(**_: object) -> None:
        heard.append(notices.isEnabledFor(logging.WARNING))
        raise error

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    address = "local" if isinstance(error, OSError) else "auto"
    with pytest.raises(ConfigError, match=told), ray_session.connect(ClusterConfig(address=address)):
        pass
    assert heard == [False]
    assert notices.isEnabledFor(logging.WARNING)
