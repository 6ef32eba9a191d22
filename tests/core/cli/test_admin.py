from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import msgspec
import numpy as np
import pytest

from faults import proxy
from fedplat.admin import AdminClient
from fedplat.admin.profile import Profile
from fedplat.aggregate import FedAdam
from fedplat.errors import FedplatError, JobFileError, ModelError, ServerRefusedError, ServerUnreachableError
from fedplat.job import JobSpec, Model, Selection, parse_job
from fedplat.model import Parameters
from support.cli.fake_admin import FakeServer
from support.cli.fake_state import S, State
from support.cli.story import ending, script

JOB = 'name = "a"\npopulation = "p"\ntrainer = "t"\nrounds = 2\nmodel.initial = "m:f"\nselection.goal = 4\n'
CALLS: dict[str, Callable[[AdminClient], object]] = {
    "status": lambda client: client.status(),
    "upload": lambda client: client.upload_model([b"x"]),
    "create": lambda client: client.create_job(JOB, "d", "k"),
    "list": lambda client: client.list_jobs(),
    "show": lambda client: client.show_job("x"),
    "start": lambda client: client.start("x"),
    "pause": lambda client: client.pause("x"),
    "resume": lambda client: client.resume("x"),
    "cancel": lambda client: client.cancel("x"),
    "set": lambda client: client.set_job("x", ["retention.versions=5"]),
    "rollback": lambda client: client.rollback("x", 1),
    "watch": lambda client: list(client.watch_job("x")),
    "rounds": lambda client: client.list_rounds("x"),
    "clients": lambda client: client.list_clients(),
    "versions": lambda client: client.list_versions("x"),
    "export": lambda client: client.export_model("x", None, "never-written"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_without_a_server_every_call_fails_with_one_line(call: Callable[[AdminClient], object], closed_port: str):
    with AdminClient(Profile(closed_port, insecure=True)) as client, pytest.raises(ServerUnreachableError) as caught:
        call(client)
    assert str(caught.value) == (
        f"no fedplat server answers at {closed_port} (Connection refused); "
        "check that it is running (fedplat-server run)"
    )


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_refusal_is_the_servers_text(call: Callable[[AdminClient], object], state: State, client: AdminClient):
    state.refusal = (grpc.StatusCode.PERMISSION_DENIED, "operators only")
    with pytest.raises(ServerRefusedError, match=r"^operators only$"):
        call(client)


def test_a_job_of_objects_is_submitted(state: State, client: AdminClient):
    model = Parameters.from_arrays({"weight": np.ones(3, np.float32)})
    job = JobSpec(
        name="made",
        population="demo",
        trainer="linear",
        rounds=3,
        model=Model("trainer:model"),
        selection=Selection(goal=2),
        aggregation=FedAdam(learning_rate=0.1),
    )
    created = client.submit_job(job, model, "key")
    assert created.status == S.JOB_STATUS_RUNNING
    assert parse_job(state.jobs[created.job_id].job_file) == job
    assert Parameters.from_bytes(state.models[created.model.digest]) == model
    assert client.submit_job(job, model, "key") == created
    with pytest.raises(JobFileError, match=r"^rounds = 0: expected a whole number >= 1$"):
        client.submit_job(msgspec.structs.replace(job, rounds=0), model)


@pytest.mark.parametrize("lost", ["CreateJob", "StartJob"])
def test_a_job_of_objects_is_created_once_if_an_answer_is_lost(state: State, client: AdminClient, lost: str):
    state.lost_answers = {lost}
    made = client.submit_job(parse_job(JOB), Parameters.from_arrays({"weight": np.ones(3, np.float32)}))
    assert made.status == S.JOB_STATUS_RUNNING
    assert list(state.jobs) == [made.job_id]


def test_a_failure_of_the_server_points_to_its_log(state: State, server: FakeServer, client: AdminClient):
    state.refusal = (grpc.StatusCode.INTERNAL, "disk full")
    with pytest.raises(ServerRefusedError) as caught:
        client.status()
    assert str(caught.value) == f"the server at {server.address} failed (disk full); see its log"


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        (grpc.StatusCode.INTERNAL, ServerRefusedError, "the server failed: number 7"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, ServerRefusedError, "the server failed: number 7"),
        (
            grpc.StatusCode.UNAVAILABLE,
            ServerUnreachableError,
            "the fedplat server at {server} is not available: the server failed: number 7",
        ),
    ],
)
def test_what_the_server_itself_says_is_passed_on(
    code: grpc.StatusCode,
    error: type[FedplatError],
    text: str,
    state: State,
    server: FakeServer,
    client: AdminClient,
):
    state.refusal, state.refusal_code = (code, "the server failed: number 7"), "INTERNAL"
    with pytest.raises(error) as caught:
        client.status()
    assert str(caught.value) == text.format(server=server.address)
    state.retry = "1.0 5.0"
    with pytest.raises(error) as caught:
        client.status()
    assert str(caught.value) == text.format(server=server.address) + "; try again in 1.0 s to 5.0 s"


@pytest.mark.slow
def test_a_silent_server_counts_as_missing():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with (
            AdminClient(Profile(address, insecure=True), timeout_s=0.2) as client,
            pytest.raises(ServerUnreachableError, match=r"within 0.2 s"),
        ):
            client.status()


def test_another_grpc_server_is_named_as_such():
    other = grpc.server(ThreadPoolExecutor(1))
    address = f"127.0.0.1:{other.add_insecure_port('127.0.0.1:0')}"
    other.start()
    try:
        with (
            AdminClient(Profile(address, insecure=True)) as client,
            pytest.raises(ServerRefusedError, match="it is not a fedplat server, or it is older than this program"),
        ):
            client.status()
    finally:
        other.stop(None).wait()


@pytest.mark.parametrize("address", ["localhost:1", "127.0.0.1:65535", "[::1]:7443", "fed.example.org:80"])
def test_addresses(address: str):
    with AdminClient(Profile(address, insecure=True)) as client:
        assert client.server == address


@pytest.mark.parametrize(
    "address", ["", "localhost", "localhost:", ":80", "h:0", "h:65536", "h:-1", "a b:1", "http://h:80", "h:80/x", "h:٣"]
)
def test_wrong_addresses(address: str):
    with pytest.raises(ValueError, match="expected host:port, for instance "):
        AdminClient(Profile(address, insecure=True))


def test_waits_for_a_server(server: FakeServer):
    with AdminClient(Profile(server.address, insecure=True)) as client:
        server.stop()
        with pytest.raises(ServerUnreachableError):
            client.status()
        with pytest.raises(ServerUnreachableError, match=r"no answer within 0.1 s"):
            client.wait_until_ready(timeout_s=0.1)
        server.restart()
        assert client.wait_until_ready(timeout_s=60).process_id == 4711


def test_a_job_from_upload_to_cancellation(state: State, client: AdminClient):
    data = bytes(range(256)) * 100
    uploaded = client.upload_model(data[i : i + 1000] for i in range(0, len(data), 1000))
    assert uploaded.digest == hashlib.sha256(data).hexdigest()
    assert state.models[uploaded.digest] == data
    job = client.create_job(JOB, uploaded.digest, "key")
    assert client.create_job(JOB, uploaded.digest, "key").job_id == job.job_id
    assert client.create_job(JOB, uploaded.digest, "other").job_id != job.job_id
    assert len(client.list_jobs()) == 2
    changes = (client.start, client.pause, client.resume, client.cancel)
    statuses = [change(job.job_id).status for change in changes]
    assert statuses == [
        S.JOB_STATUS_RUNNING,
        S.JOB_STATUS_PAUSED,
        S.JOB_STATUS_RUNNING,
        S.JOB_STATUS_CANCELLED,
    ]
    assert client.show_job(job.job_id).status == S.JOB_STATUS_CANCELLED


def test_an_upload_that_was_damaged_is_refused(state: State, client: AdminClient):
    state.damage = "digest"
    with pytest.raises(ServerRefusedError, match=f"digest {'0' * 64}, but .* was sent; try again"):
        client.upload_model([b"abc"])


def test_a_watch_ends_with_its_job(state: State, client: AdminClient):
    job = state.add_job()
    events = script()
    state.add_events(*events, ending())
    assert [event.sequence for event in client.watch_job(job.job_id)] == [10 * (i + 1) for i in range(len(events) + 1)]
    assert len(list(client.watch_job(job.job_id, after_sequence=30))) == len(events) - 2


def test_a_watch_that_is_left_frees_its_server(state: State, client: AdminClient):
    job = state.add_job()
    state.add_events(*script())
    watch = client.watch_job(job.job_id)
    assert next(watch).sequence == 10
    watch.close()
    assert state.left.wait(60)


def test_a_version_is_exported(state: State, client: AdminClient, tmp_path: Path):
    state.add_job()
    old, new = state.add_version(b"old" * 1000, 0), state.add_version(b"n" * (3 * 2**20 + 1), 1)
    seen: list[tuple[int, int]] = []
    path = tmp_path / "model.safetensors"
    assert client.export_model("digits", None, path, lambda done, total: seen.append((done, total))) == new.model
    assert path.read_bytes() == b"n" * (3 * 2**20 + 1)
    assert seen[-1] == (3 * 2**20 + 1, 3 * 2**20 + 1)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert client.export_model("digits", 0, path) == old.model
    assert path.read_bytes() == b"old" * 1000
    assert list(tmp_path.iterdir()) == [path]


def test_an_export_replaces_a_file_in_one_step(state: State, client: AdminClient, tmp_path: Path):
    state.add_job()
    state.add_version(b"new")
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"before")
    with path.open("rb") as reader:  # a reader of the old file keeps the old file
        client.export_model("digits", None, path)
        assert reader.read() == b"before"
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("damage", ["bytes", "short", "long", "empty"])
@pytest.mark.parametrize("existing", [None, b"before"])
def test_a_damaged_export_leaves_no_file(
    damage: str, existing: bytes | None, state: State, client: AdminClient, tmp_path: Path
):
    state.add_job()
    state.add_version(b"content" * 1000)
    state.damage = damage
    path = tmp_path / "model.safetensors"
    if existing is not None:
        path.write_bytes(existing)
    with pytest.raises(ModelError, match=r"received model is damaged: .*; try again"):
        client.export_model("digits", None, path)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == ([existing] if existing is not None else [])


def test_a_refused_export_leaves_no_file(state: State, client: AdminClient, tmp_path: Path):
    state.add_job()
    state.add_version(b"x")
    with pytest.raises(ServerRefusedError, match="the job has no version 7"):
        client.export_model("digits", 7, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_an_export_to_nowhere_is_an_os_error(state: State, client: AdminClient, tmp_path: Path):
    state.add_job()
    state.add_version(b"x")
    with pytest.raises(FileNotFoundError):
        client.export_model("digits", None, tmp_path / "nowhere" / "model")
    with pytest.raises(IsADirectoryError):
        client.export_model("digits", None, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_connection_that_breaks_at_once_is_not_taken_for_an_answer(server: FakeServer) -> None:
    """A server that is restarting may look like this."""
    with proxy.in_thread(server.address) as network, AdminClient(Profile(network.address, insecure=True)) as admin:
        network.set(proxy.Weather(to_client=proxy.Way(cut_after=60)))
        mending = threading.Timer(0.3, network.set, [proxy.CLEAR])
        mending.start()
        assert admin.wait_until_ready(60.0).software_version
        mending.join()
        network.set(proxy.Weather(to_client=proxy.Way(cut_after=60)))
        network.cut()
        with pytest.raises(ServerUnreachableError):
            admin.wait_until_ready(0.3)
