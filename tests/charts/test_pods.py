"""The rendered pods as processes: their init containers, their probes as the kubelet sends them, and their end."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedplat.admin import AdminClient, profile
from support import charts, databases, processes
from support.charts import CHART, values_of
from support.kubernetes import Pod

pytestmark = pytest.mark.slow
SERVER = str(processes.BIN / "fedplat-server")


def stateful_set(*options: str) -> Any:
    return next(item for item in charts.render(*options) if item["kind"] == "StatefulSet")


def probe(pod: Pod, name: str) -> bool:
    """Whether a probe succeeds."""
    settings = pod.spec["containers"][0][name]["grpc"]
    with grpc.insecure_channel(f"127.0.0.1:{pod.ports[settings['port']]}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=settings.get("service", ""))
        try:
            return stub.Check(request).status == health_pb2.HealthCheckResponse.SERVING
        except grpc.RpcError:
            return False


def wait_until_ready(pod: Pod) -> None:
    def is_ready() -> bool:
        assert pod.is_running(), pod.log
        return probe(pod, "startupProbe") and probe(pod, "readinessProbe")

    processes.until(is_ready, f"{pod.name} to be ready")


@contextlib.contextmanager
def running(*pods: Pod) -> Generator[None]:
    try:
        for pod in pods:
            pod.start()
        yield
    finally:
        statuses = [pod.terminate() for pod in pods]
    assert statuses == [0] * len(pods), [pod.log for pod in pods]


def volumes(folder: Path, *names: str) -> dict[str, Path]:
    made = {name: folder / name for name in names}
    for path in made.values():
        path.mkdir(parents=True)
    return made


def admin(pod: Pod, path: Path) -> AdminClient:
    return AdminClient(msgspec.structs.replace(profile.load(path), server=f"localhost:{pod.ports[7443]}"))


def test_single_pod_sets_itself_up_and_keeps_it(tmp_path: Path) -> None:
    options = [*values_of(CHART / "values" / "single.yaml"), "--set", "metrics.enabled=true,mtls.enabled=true"]
    pod = Pod(stateful_set(*options), 0, volumes(tmp_path, "data", "tmp"), tmp_path / "pod")
    first = pod.initialize()
    assert first.count("made the ") == 4
    profile_path = pod.path("/var/lib/fedplat/data/admin.toml")
    assert profile_path == tmp_path / "data" / "data" / "admin.toml"
    text = profile_path.read_text()
    with running(pod):
        wait_until_ready(pod)
        assert probe(pod, "livenessProbe")
        with admin(pod, profile_path) as client:
            assert client.status().num_clients == 0
    second = pod.initialize()
    assert "made the " not in second
    assert profile_path.read_text() == text
    with running(pod):
        wait_until_ready(pod)


class Secrets:
    """Folders with the content of the Secrets of `docs/kubernetes.md`."""

    def __init__(self, folder: Path, database: str, hosts: list[str]) -> None:
        self.folder, self.authority = folder, folder / "authority"
        names = [f"--host={host}" for host in hosts]
        subprocess.run([SERVER, "init", "--data-dir", str(self.authority), *names], check=True, capture_output=True)
        self.folders = volumes(folder, "database", "pki")
        (self.folders["database"] / "url").write_text(database)
        self.publish()

    def publish(self) -> None:
        """Make the certificates of the authority those of the Secret, as the kubelet does: by renames."""
        for name in ("ca.pem", "ca.key", "server.pem", "server.key"):
            draft = self.folders["pki"] / f"..{name}"
            draft.write_bytes((self.authority / "pki" / name).read_bytes())
            draft.replace(self.folders["pki"] / name)

    def renew(self) -> None:
        renewal = [SERVER, "certificates", "renew", "--data-dir", str(self.authority)]
        subprocess.run(renewal, check=True, capture_output=True)
        self.publish()


@pytest.fixture
def secrets(tmp_path: Path) -> Iterator[Secrets]:
    with databases.postgres_server() as server, databases.postgres_database(server, "template1") as url:
        yield Secrets(tmp_path / "secrets", url, ["fed.example.org", "fedplat.fedplat.svc"])


def make_pods(folder: Path, secrets: Secrets) -> list[Pod]:
    # A leader that is stopped hands over at once. A long lease keeps a slow machine from more takeovers.
    found = stateful_set(*values_of(CHART / "values" / "scale-rwx.yaml"), "--set", "leaseSeconds=60,mtls.enabled=true")
    shared = volumes(folder, "data")
    return [
        Pod(found, index, {**shared, **secrets.folders, **volumes(folder / f"own-{index}", "tmp")}, folder / f"{index}")
        for index in range(found["spec"]["replicas"])
    ]


def test_several_pods_start_at_once_and_the_leader_may_go(tmp_path: Path, secrets: Secrets) -> None:
    pods = make_pods(tmp_path / "cluster", secrets)
    for together in zip(*(pod.start_init() for pod in pods), strict=True):  # each init container of all pods at once
        for process in together:
            output = process.communicate(timeout=processes.PATIENCE_S)[0]
            assert process.returncode == 0, output
    assert len({pod.path("/var/lib/fedplat/data") for pod in pods}) == 1
    with running(*pods):
        for pod in pods:
            wait_until_ready(pod)
        operator = tmp_path / "admin.toml"
        operator.touch(0o600)
        add = ("fedplat-server", "operator", "add", "admin", "--role=admin", "--server=localhost:7443")
        operator.write_text(pods[0].execute(*add))
        leaders = [pod for pod in pods if not role(pod, operator)]
        (leader,) = leaders
        (gateway,) = [pod for pod in pods if pod is not leader]

        secrets.renew()
        assert role(gateway, operator)  # a new connection
        processes.until(lambda: "loaded new certificates" in gateway.log, "the renewed certificate")

        assert leader.terminate() == 0
        processes.until(lambda: probe(gateway, "readinessProbe") and not role(gateway, operator), "a takeover")


def role(pod: Pod, operator: Path) -> str:
    """The name of a gateway; "" for the leader."""
    with admin(pod, operator) as client:
        client.wait_until_ready(processes.PATIENCE_S)
        return client.status().gateway


def test_an_authority_on_the_volume_is_not_replaced_by_the_secret(tmp_path: Path) -> None:
    secrets = Secrets(tmp_path / "secrets", "postgresql://not-used", ["fed.example.org"])
    pod = make_pods(tmp_path / "cluster", secrets)[0]
    own = pod.path("/var/lib/fedplat/data/pki/ca.pem")
    own.parent.mkdir(parents=True)
    own.write_text("an authority that clients trust")
    process = next(iter(pod.start_init()))
    output = process.communicate(timeout=processes.PATIENCE_S)[0]
    assert process.returncode == 1
    assert "ca.pem is not a link to the Secret: the volume has an authority of its own." in output
    assert own.read_text() == "an authority that clients trust"
