"""The data directory: identity, permissions, damage, and the lock."""

from __future__ import annotations

import pwd
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import msgspec
import pytest

from fedplat.wire.auth import Ticket
from fedplat.wire.v1 import model_pb2
from fedplat_client import Client, DataDirectoryError, Task, TrainResult
from fedplat_client._state.data_dir import DataDirectory, Identity
from support.fake_fleet import FakeFleet

MakeClient = Callable[..., Client]


def no_op(task: Task) -> TrainResult:
    return TrainResult(parameters=task.parameters, num_examples=1)


def test_the_identity_survives_a_restart_and_is_private(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, tmp_path: Path
) -> None:
    for _ in range(2):
        fleet.assign(model)
        client = make_client()
        client.add_trainer("digits", no_op)
        client.run(max_tasks=1)
    assert fleet.calls.count("Enroll") == 1
    (path,) = tmp_path.glob("data/*/demo/identity.json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
    assert b"client-1" in path.read_bytes()
    key = path.with_name("identity.key")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert key.read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----")


def test_a_crash_between_call_and_reply_does_not_enrol_twice(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef
) -> None:
    fleet.lost_replies["Enroll"] = 1
    fleet.assign(model)
    client = make_client()
    client.add_trainer("digits", no_op)
    client.run(max_tasks=1)
    assert fleet.calls.count("Enroll") == 2
    assert len(fleet.clients) == 1


def test_the_idempotency_key_is_stored_before_the_first_call(
    fleet: FakeFleet, make_client: MakeClient, tmp_path: Path
) -> None:
    fleet.failures["Enroll"] = [grpc.StatusCode.INVALID_ARGUMENT]
    client = make_client()
    client.add_trainer("digits", no_op)
    with pytest.raises(Exception, match="does not accept"):
        client.run()
    (path,) = tmp_path.glob("data/*/demo/identity.json")
    assert fleet.requests["Enroll"][0].idempotency_key in path.read_text()


@pytest.mark.parametrize("content", [b"", b"{", b'{"idempotency_key": ""}', b'{"x": 1}', b"\xff\xfe", b"[]"])
def test_a_damaged_identity_is_named_with_its_remedy(tmp_path: Path, content: bytes) -> None:
    directory = DataDirectory(tmp_path, "localhost:1", "demo")
    with directory.lock():
        path = directory.path / "identity.json"
        path.write_bytes(content)
        with pytest.raises(DataDirectoryError, match=r"identity\.json is damaged .*delete it to enroll as a new"):
            directory.load_identity()


def test_a_leftover_of_a_crash_while_writing_does_no_harm(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path, "localhost:1", "demo")
    with directory.lock():
        identity = Identity("key", "localhost:1", "demo", "client-1")
        directory.save(identity)
        leftover = directory.path / ".fedplat-0123456789abcdef.tmp"
        leftover.write_bytes(b"{")
        leftover.chmod(0o644)
        assert directory.load_identity() == identity
        directory.save(identity)
        assert stat.S_IMODE((directory.path / "identity.json").stat().st_mode) == 0o600


def test_a_second_process_is_refused(fleet: FakeFleet, make_client: MakeClient, tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "data", fleet.address, "demo")
    holder = (
        "import sys; from pathlib import Path; from fedplat_client._state.data_dir import DataDirectory\n"
        "with DataDirectory(Path(sys.argv[1]), sys.argv[2], 'demo').lock():\n"
        "    print('locked', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path / "data"), fleet.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        client = make_client()
        client.add_trainer("digits", no_op)
        with pytest.raises(DataDirectoryError, match="in use by another client"):
            client.run(max_tasks=1)
        process.communicate()
    with directory.lock():
        pass  # freed when its holder ended


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DataDirectoryError, match=r"cannot be used.*choose one that this user may write to"),
        DataDirectory(tmp_path / "file", "localhost:1", "demo").lock(),
    ):
        pass


def test_no_two_names_share_a_folder_and_none_leads_elsewhere(tmp_path: Path) -> None:
    names = ["a:1", "a_1", "a/1", "..", ".", "%2E%2E", "a%3A1", "../a", "ä"]
    paths = {DataDirectory(tmp_path, "s", name).path for name in names}
    assert len(paths) == len(names)
    assert all(path.resolve().parent == tmp_path / "s" for path in paths)


def test_a_ticket_cannot_take_tls_from_a_known_server(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path, "server:1", "demo")
    with_tls = Ticket(server="server:1", population="demo", secret="a" * 43, tls=True, ca="pem")
    without = msgspec.structs.replace(with_tls, tls=False, ca="")
    with directory.lock():
        known = directory.load_identity(with_tls)
        with pytest.raises(DataDirectoryError, match="without TLS, and this client has used TLS with it") as caught:
            directory.load_identity(without)
        assert f"delete {directory.path / 'identity.json'}" in str(caught.value)
        assert directory.load_identity() == known
        assert directory.load_identity(msgspec.structs.replace(with_tls, ca="another")).ca == "another"
    other = DataDirectory(tmp_path, "server:2", "demo")
    with other.lock():
        assert not other.load_identity(without).tls
        assert other.load_identity(with_tls).tls


def test_the_key_of_a_lost_identity_stays_for_a_backup(tmp_path: Path) -> None:
    place = DataDirectory(tmp_path, "server:1", "demo")
    with place.lock():
        place.load_signing_key(place.load_identity())
        former = {name: (place.path / name).read_bytes() for name in ("identity.json", "identity.key")}
        (place.path / "identity.json").unlink()
        place.load_signing_key(place.load_identity())
        assert (place.path / "identity.key").read_bytes() != former["identity.key"]
        (kept,) = place.path.glob("identity.key.*")
        assert kept.read_bytes() == former["identity.key"]


def test_a_user_without_a_home_is_told_what_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_no_user(number: int) -> None:
        raise KeyError(number)

    for name in ("HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", find_no_user)
    with pytest.raises(DataDirectoryError, match="no home directory: name a folder with --data-dir"):
        Client("127.0.0.1:1", population="demo")
    with pytest.raises(DataDirectoryError, match="begins with ~"):
        Client("127.0.0.1:1", population="demo", data_dir="~/clients")
