"""The same job with the same bits over gRPC, HTTP/1.1, a proxy that asks for a password, and nginx that ends TLS."""

from __future__ import annotations

import contextlib
import getpass
import logging
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np
import pytest

from fedplat.errors import FedplatError
from fedplat.model import Parameters
from fedplat.wire.auth import Ticket
from fedplat_client import Client, ClientOptions, Task, TrainResult
from support import deployment, processes, programs
from support.clients import at_work
from support.connect_proxy import ConnectProxy
from support.jobs import write_job

pytestmark = pytest.mark.slow
LARGE = Parameters.from_arrays({"weight": np.arange(2_500_000, dtype=np.float32)})
"""A model of 10 MB: an upload of several requests."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[processes.Server]:
    http = f"127.0.0.1:{processes.free_port()}"
    folder = tmp_path_factory.mktemp("http") / "server"
    with processes.server(folder, "--http-listen", http, "--http-address", http) as running:
        yield running
        assert running.stop() == 0
    assert "Traceback" not in running.log_text()


def train(task: Task) -> TrainResult:
    task.parameters["weight"] *= np.float32(1.5)
    return TrainResult(parameters=task.parameters, num_examples=1)


def trained(server: processes.Server, name: str, folder: Path, options: ClientOptions, http: str = "") -> Parameters:
    """The model of a job with one client, which has these options."""
    with server.admin() as admin:
        ticket = Ticket.from_text(admin.create_enrollment(name, 1, 3600.0, server.address).ticket)
        assert ticket.http
        text = Ticket(ticket.server, name, ticket.secret, ticket.tls, ticket.ca, http or ticket.http).to_text()
        client = Client.from_ticket(text, data_dir=folder / name, options=options)
        client.add_trainer("toy", train)
        with at_work([client]):
            job = deployment.submit(admin, write_job(name, population=name, trainer="toy", rounds=2), LARGE)
            deployment.completed(admin, job)
        return deployment.exported(admin, job, folder)


@contextlib.contextmanager
def nginx(server: processes.Server, folder: Path, upstream: str) -> Generator[tuple[str, Path]]:
    """nginx with its default limits, which ends TLS; its address and its log."""
    address, log, pki = f"127.0.0.1:{processes.free_port()}", folder / "access.log", server.folder / "pki"
    text = f"""
        user {getpass.getuser()}; daemon off; worker_processes 1; pid {folder}/nginx.pid;
        error_log {folder}/error.log; events {{}}
        http {{
            access_log {log}; client_body_temp_path {folder}/body; proxy_temp_path {folder}/a;
            fastcgi_temp_path {folder}/b; uwsgi_temp_path {folder}/c; scgi_temp_path {folder}/d;
            server {{
                listen {address} ssl;
                ssl_certificate {pki}/server.pem;
                ssl_certificate_key {pki}/server.key;
                location / {{ proxy_pass https://{upstream}; }}
            }}
        }}
    """
    file = folder / "nginx.conf"
    file.write_text(text)
    command = [programs.require("nginx"), "-e", str(folder / "error.log"), "-p", str(folder), "-c", str(file)]
    with processes.processes([command], folder / "nginx.out"):
        yield address, log


def test_one_job_has_the_same_bits_over_every_way(server: processes.Server, tmp_path: Path) -> None:
    http = server.command[server.command.index("--http-listen") + 1]
    proxy = ConnectProxy("anna", "s e")
    over_grpc = trained(server, "over-grpc", tmp_path, ClientOptions())
    found = [trained(server, "over-http", tmp_path, ClientOptions(transport="http"))]
    with proxy.running():
        through = f"http://anna:s%20e@127.0.0.1:{proxy.port}"
        found.append(trained(server, "http-proxy", tmp_path, ClientOptions(transport="http", proxy=through)))
        opened = proxy.num_opened
        assert opened > 0
        found.append(trained(server, "grpc-proxy", tmp_path, ClientOptions(proxy=through)))
        assert proxy.num_opened > opened
    with nginx(server, tmp_path, http) as (address, log):
        found.append(trained(server, "over-nginx", tmp_path, ClientOptions(transport="http"), address))
        assert " 413 " in log.read_text()
    expected = LARGE["weight"] * np.float32(1.5) * np.float32(1.5)
    for each in (over_grpc, *found):
        assert each["weight"].tobytes() == over_grpc["weight"].tobytes()
        np.testing.assert_allclose(each["weight"], expected, rtol=1e-5)


def test_a_proxy_that_refuses_is_named_with_the_remedy(
    server: processes.Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ConnectProxy("anna", "secret").running() as proxy, server.admin() as admin:
        ticket = admin.create_enrollment("refused", 1, 3600.0, server.address).ticket
        options = ClientOptions(transport="http", proxy=f"http://anna:wrong@127.0.0.1:{proxy.port}")
        client = Client.from_ticket(ticket, data_dir=tmp_path / "client", options=options)
        client.add_trainer("toy", train)
        with caplog.at_level(logging.WARNING), at_work([client]):
            processes.until(lambda: proxy.num_refused >= 2, "requests that the proxy refuses")
            processes.until(lambda: bool(caplog.records), "a line of the log")
    said = caplog.records[0].getMessage()
    assert "407, it wants a user and a password" in said
    assert f"127.0.0.1:{proxy.port} of --proxy" in said
    assert "wrong" not in said


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"transport": "soap"}, "expected 'grpc' or 'http'"),
        ({"transport": "http", "mtls": True}, "mtls needs gRPC"),
        ({"proxy": "socks5://proxy:1080"}, "expected a URL such as"),
        ({"proxy": "http://"}, "expected a URL such as"),
    ],
)
def test_options_that_do_not_fit_are_refused(given: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ClientOptions(**given)  # type: ignore[arg-type]


def test_a_file_of_authorities_must_have_some(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    with pytest.raises(FedplatError, match="cannot be read"):
        ClientOptions(ca=file).read_authorities()
    file.write_text("nothing")
    with pytest.raises(FedplatError, match="no certificate in PEM"):
        ClientOptions(ca=file).read_authorities()
