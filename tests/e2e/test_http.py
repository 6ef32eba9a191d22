"""The same job with the same bits over every way to the server, and the choice between gRPC and HTTP/1.1.

The ways: gRPC and HTTP/1.1, each directly and through a proxy that asks for a password, and through nginx and HAProxy,
which end TLS.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from faults import proxy
from fedplat.errors import FedplatError
from fedplat.model import Parameters
from fedplat.wire.auth import Ticket
from fedplat.wire.http_channel import HttpChannel
from fedplat_client import Client, ClientOptions, Task, TrainResult
from fedplat_client._work import ranges
from fedplat_client.link import ServerLink
from fedplat_client.transport import OpenChannel
from fedplat_server.auth import pki_folder
from fedplat_server.auth.pki_folder import PkiFolder
from support import deployment, load_balancers, processes
from support.clients import at_work
from support.connect_proxy import ConnectProxy
from support.deployment import run_fedplat
from support.jobs import write_job

pytestmark = pytest.mark.slow
LARGE = Parameters.from_arrays({"weight": np.arange(2_500_000, dtype=np.float32)})
"""A model of 10 MB: an upload of several requests."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[processes.Server]:
    http = f"127.0.0.1:{processes.free_port()}"
    folder = tmp_path_factory.mktemp("http") / "server"
    with processes.server(folder, "--http-listen", http, "--http-address", http, "--http-operators") as running:
        yield running
        assert running.stop() == 0
    assert "Traceback" not in running.log_text()


def train(task: Task) -> TrainResult:
    task.parameters["weight"] *= np.float32(1.5)
    return TrainResult(parameters=task.parameters, num_examples=1)


def ticket_of(server: processes.Server, population: str, *, address: str = "", http: str = "") -> str:
    """A ticket of a client that reaches the server at these addresses."""
    ticket = Ticket.from_text(server.ticket(population))
    assert ticket.http
    return msgspec.structs.replace(ticket, server=address or ticket.server, http=http or ticket.http).to_text()


def trained(
    server: processes.Server, name: str, folder: Path, options: ClientOptions, *, address: str = "", http: str = ""
) -> Parameters:
    """The model of a job with one client, which has these options, and reaches the server at these addresses."""
    client = Client.from_ticket(
        ticket_of(server, name, address=address, http=http), data_dir=folder / name, options=options
    )
    client.add_trainer("toy", train)
    with server.admin() as admin:
        with at_work([client]):
            job = deployment.submit(admin, write_job(name, population=name, trainer="toy", rounds=2), LARGE)
            deployment.completed(admin, job)
        return deployment.exported(admin, job, folder)


def test_one_job_has_the_same_bits_over_every_way(server: processes.Server, tmp_path: Path) -> None:
    http = server.command[server.command.index("--http-listen") + 1]
    tunnels = ConnectProxy("anna", "s e")
    over_grpc = trained(server, "over-grpc", tmp_path, ClientOptions())
    found = [trained(server, "over-http", tmp_path, ClientOptions(transport="http"))]
    with tunnels.running():
        through = f"http://anna:s%20e@127.0.0.1:{tunnels.port}"
        found.append(trained(server, "http-proxy", tmp_path, ClientOptions(transport="http", proxy=through)))
        opened = tunnels.num_opened
        assert opened > 0
        found.append(trained(server, "grpc-proxy", tmp_path, ClientOptions(proxy=through)))
        assert tunnels.num_opened > opened
    with load_balancers.nginx(pki_of(server), tmp_path / "nginx", http) as (address, log):
        found.append(trained(server, "over-nginx", tmp_path, ClientOptions(transport="http"), http=address))
        assert " 413 " in log.read_text()
    with load_balancers.haproxy(pki_of(server), tmp_path / "haproxy", http) as (address, log):
        found.append(trained(server, "over-haproxy", tmp_path, ClientOptions(transport="http"), http=address))
        assert "POST /fedplat.wire.v1.Fleet/Upload HTTP/1.1" in log.read_text()
    expected = LARGE["weight"] * np.float32(1.5) * np.float32(1.5)
    for each in (over_grpc, *found):
        assert each["weight"].tobytes() == over_grpc["weight"].tobytes()
        np.testing.assert_allclose(each["weight"], expected, rtol=1e-5)


def pki_of(server: processes.Server) -> PkiFolder:
    return PkiFolder.of(server.folder)


@pytest.mark.parametrize("balancer", ["haproxy", "nginx"])
def test_auto_changes_to_http_where_grpc_does_not_pass(
    server: processes.Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, balancer: str
) -> None:
    """One address for both, at which HTTP/1.1 alone passes: HAProxy offers no HTTP/2, and nginx breaks it."""
    upstream = server.command[server.command.index("--http-listen") + 1]
    ways = {
        "haproxy": load_balancers.haproxy(pki_of(server), tmp_path / "balancer", upstream),
        "nginx": load_balancers.nginx(pki_of(server), tmp_path / "balancer", upstream, http2=True),
    }
    reasons = {"haproxy": "does not speak gRPC", "nginx": "answers with the HTTP status 415"}
    with ways[balancer] as (address, log), caplog.at_level(logging.INFO):
        reached = {"address": address, "http": address}
        found = trained(server, f"auto-{balancer}", tmp_path, ClientOptions(), **reached)
        lines = [record.getMessage() for record in caplog.records if "HTTP/1.1 at" in record.getMessage()]
        assert len(lines) == 1, lines
        assert reasons[balancer] in lines[0]
        requests = log.read_text()
        caplog.clear()
        again = trained(server, f"auto-{balancer}", tmp_path, ClientOptions(), **reached)
        said = [record.getMessage() for record in caplog.records]
        assert any("gRPC got no answer in this network before" in line for line in said)
        assert not any("cannot be used" in line for line in said)
    expected = LARGE["weight"] * np.float32(1.5) * np.float32(1.5)
    for each in (found, again):
        np.testing.assert_allclose(each["weight"], expected, rtol=1e-5)
    # No octet was sent twice: 10 MB in pieces of 8 MiB or, after a refusal, of 512 KiB, in each of two rounds.
    stored = [line for line in requests.splitlines() if "Fleet/Upload HTTP" in line and " 413 " not in line]
    assert len(stored) == 2 * {"haproxy": 2, "nginx": 20}[balancer], requests


def test_auto_stays_with_grpc_if_a_certificate_is_not_trusted(
    server: processes.Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The address of gRPC is answered by another authority's server, and that of HTTP/1.1 by the right one."""
    upstream = server.command[server.command.index("--http-listen") + 1]
    other, now = PkiFolder.of(tmp_path / "other"), datetime.datetime.now(datetime.UTC)
    other.make_authority(now)
    other.make_server(pki_folder.all_hosts([]), now)
    with load_balancers.haproxy(other, tmp_path / "haproxy", upstream) as (address, _):
        options = ClientOptions(first_backoff_s=0.01, max_backoff_s=0.05)
        client = Client.from_ticket(
            ticket_of(server, "distrusting", address=address), data_dir=tmp_path / "client", options=options
        )
        client.add_trainer("toy", train)

        def refusals() -> int:
            return sum("not issued by a trusted authority" in record.getMessage() for record in caplog.records)

        with caplog.at_level(logging.INFO), at_work([client]):
            processes.until(lambda: refusals() >= 8, "calls at which the certificate is refused")
    assert not any("HTTP/1.1 at" in record.getMessage() for record in caplog.records)


def test_transfers_over_http_resume_and_take_several_connections(
    server: processes.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection is cut after 3 MB in either direction; a model and an update have 10 MB."""
    for name, value in {"MEASURED_S": 0.0, "GAIN": 0.0, "WORTH_S": 0.0, "FAST_BYTES_PER_S": float("inf")}.items():
        monkeypatch.setattr(ranges, name, value)  # each measurement is long enough, and finds that more are worth it
    dialed = list[OpenChannel]()

    def dial(link: ServerLink) -> OpenChannel:
        dialed.append(link.route.open())
        return dialed[-1]

    monkeypatch.setattr(ServerLink, "dial", dial)
    upstream = server.command[server.command.index("--http-listen") + 1]
    cut = proxy.Way(cut_after=3_000_000)
    with proxy.in_thread(upstream) as network:
        network.set(proxy.Weather(to_server=cut, to_client=cut))
        options = ClientOptions(transport="http", first_backoff_s=0.01, max_backoff_s=0.1)
        found = trained(server, "cut", tmp_path, options, http=network.address)
        assert network.num_accepted >= 2 * 2 * 3
    np.testing.assert_allclose(found["weight"], LARGE["weight"] * np.float32(1.5) * np.float32(1.5), rtol=1e-5)
    assert len(dialed) >= 2 * 2
    assert all(isinstance(each, HttpChannel) for each in dialed)


def test_the_commands_of_operators_print_the_same_over_http(server: processes.Server, tmp_path: Path) -> None:
    """A job that is submitted, followed and exported over HTTP/1.1 alone; each list is the one that gRPC has."""
    http = server.command[server.command.index("--http-listen") + 1]
    over_http = ("--transport", "http", "--server", http)
    job = tmp_path / "job.toml"
    job.write_text(write_job("operated", population="operated", trainer="toy", rounds=2))
    (tmp_path / "unused.safetensors").write_bytes(LARGE.to_bytes())
    client = Client.from_ticket(ticket_of(server, "operated"), data_dir=tmp_path / "client", options=ClientOptions())
    client.add_trainer("toy", train)
    with at_work([client]):
        said = run_fedplat(server, *over_http, "job", "submit", str(job), "--follow")
    assert ") is COMPLETED" in said
    exported = [tmp_path / "http.safetensors", tmp_path / "grpc.safetensors"]
    run_fedplat(server, *over_http, "model", "export", "operated", "--to", str(exported[0]))
    run_fedplat(server, "model", "export", "operated", "--to", str(exported[1]))
    assert exported[0].read_bytes() == exported[1].read_bytes()
    for words in (("job", "list"), ("job", "watch", "operated"), ("client", "list"), ("model", "list", "operated")):
        assert run_fedplat(server, *over_http, *words, "--json") == run_fedplat(server, *words, "--json"), words
    assert "no such job: 'unknown'" in run_fedplat(server, *over_http, "job", "watch", "unknown", status=1)
    wrong = run_fedplat(server, "--transport", "http", "--server", server.address, "status", status=5)
    assert "fedplat-server run --http-operators, and that this is the address of its --http-listen" in wrong


def test_a_proxy_that_refuses_is_named_with_the_remedy(
    server: processes.Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ConnectProxy("anna", "secret").running() as tunnels, server.admin() as admin:
        ticket = admin.create_enrollment("refused", 1, 3600.0, server.address).ticket
        options = ClientOptions(transport="http", proxy=f"http://anna:wrong@127.0.0.1:{tunnels.port}")
        client = Client.from_ticket(ticket, data_dir=tmp_path / "client", options=options)
        client.add_trainer("toy", train)
        with caplog.at_level(logging.WARNING), at_work([client]):
            processes.until(lambda: tunnels.num_refused >= 2, "requests that the proxy refuses")
            processes.until(lambda: bool(caplog.records), "a line of the log")
    said = caplog.records[0].getMessage()
    assert "407, it wants a user and a password" in said
    assert f"127.0.0.1:{tunnels.port} of --proxy" in said
    assert "wrong" not in said


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"transport": "soap"}, "expected 'auto', 'grpc' or 'http'"),
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
