"""Two server processes on two hosts, with the updates in an object store: a host is lost, or the store goes away."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fedplat.admin import AdminClient, profile, submission
from fedplat.cli import watch
from fedplat.errors import FedplatError
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from fedplat_client import Client, ClientOptions, Task, TrainResult
from fedplat_server.cli import commands
from fedplat_server.storage.object_store import ObjectStore
from fedplat_server.storage.spool_backend import list_names
from support import deployment, process_logs, processes
from support.clients import at_work
from support.jobs import write_job
from support.seaweedfs import SeaweedFS, s3, seaweedfs
from support.store_proxy import AWAY, store_proxy

__all__ = ["s3", "seaweedfs"]
pytestmark = pytest.mark.slow
ROUNDS = 3
NUM_CLIENTS = 4


def job_text(rounds: int = ROUNDS) -> str:
    return write_job(
        "survivor",
        population="few",
        trainer="add",
        rounds=rounds,
        selection={"goal": NUM_CLIENTS, "min_fraction": 1.0},
        deadlines={"heartbeat_s": 0.2},
        retry={"base_s": 0.1},
    )


class Host:
    """A `fedplat-server run` with its own data folder; models and updates are in one object store."""

    operator: profile.Profile

    def __init__(self, folder: Path, database: str, url: str, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.make()
        self.log = folder.with_suffix(".log")
        self.address = f"127.0.0.1:{processes.free_port()}"
        self.shared = ["--database", database, "--blobs", url, "--spool", url]
        self._process: subprocess.Popen[bytes] | None = None
        self._environment = environment

    def make(self) -> None:
        """Give the host an empty disk."""
        self.folder.mkdir()

    def admin(self) -> AdminClient:
        """An operator who talks to this host."""
        return AdminClient(self.operator)

    def run(self, command: str, *options: str, status: int = 0) -> str:
        """Run another command of the server on this host, in the process of the test; everything that it prints."""
        line = [command, "--data-dir", str(self.folder), *options]
        return deployment.run(commands.app, *line, status=status, environment=self._environment)

    def start(self) -> None:
        line = [str(processes.BIN / "fedplat-server"), "run", "--insecure", "--listen", self.address, "--lease", "3"]
        with process_logs.open_log(self.log) as log:
            self._process = subprocess.Popen(
                [*line, "--data-dir", str(self.folder), *self.shared],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self._environment},
            )
        with self.admin() as admin:
            admin.wait_until_ready(processes.PATIENCE_S)

    def send(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def lose(self) -> None:
        """The host burns: the process and its disk are gone."""
        self.end()
        shutil.rmtree(self.folder)

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


class Work:
    """What the clients train: it counts, and waits in the second round until it may go on."""

    def __init__(self, held: int) -> None:
        self.trained: Counter[tuple[str, int]] = Counter()
        self.go_on = threading.Event()
        self._held = held
        self._lock = threading.Lock()

    def of(self, name: str, value: float) -> Callable[[Task], TrainResult]:
        def train(task: Task) -> TrainResult:
            with self._lock:
                self.trained[name, task.round] += 1
                is_held = task.round == 2 and sum(number == 2 for _, number in self.trained) > NUM_CLIENTS - self._held
            if is_held:
                assert self.go_on.wait(processes.PATIENCE_S)
            task.parameters["weight"][:] += value
            return TrainResult(parameters=task.parameters, num_examples=5)

        return train


@contextlib.contextmanager
def at_training(admin: AdminClient, address: str, folder: Path, work: Work, rounds: int = ROUNDS) -> Generator[str]:
    """A job, and clients that train for it, each with its own number; yields the job's id."""
    ticket = admin.create_enrollment("few", NUM_CLIENTS, 3600.0, address).ticket
    options = ClientOptions(max_backoff_s=0.5, call_timeout_s=30.0)
    clients = [Client.from_ticket(ticket, data_dir=folder / str(n), options=options) for n in range(NUM_CLIENTS)]
    for number, client in enumerate(clients):
        client.add_trainer("add", work.of(str(number), float(number)))
    model = Parameters.from_arrays({"weight": np.zeros(16, np.float32)})
    text = job_text(rounds)
    with at_work(clients):
        try:
            yield submission.submit(admin, submission.Submission(text, parse_job(text), model)).job_id
        finally:
            work.go_on.set()


def finish(admin: AdminClient, job_id: str, folder: Path, work: Work, rounds: int = ROUNDS) -> None:
    """The job ends with the mean of all updates of each round, and no client has trained twice for one."""
    ended = watch.follow(admin, job_id, watch.View(lambda event: None, print))
    assert ended.status == admin_pb2.JOB_STATUS_COMPLETED
    assert set(work.trained.values()) == {1}
    assert len(work.trained) == rounds * NUM_CLIENTS
    assert all(each.attempt == 1 for each in admin.list_rounds(job_id, all_attempts=True))
    admin.export_model(job_id, None, folder / "final.safetensors")
    expected = rounds * np.mean(np.arange(NUM_CLIENTS))
    np.testing.assert_allclose(Parameters.open(folder / "final.safetensors")["weight"], expected, rtol=1e-6)


def reported(admin: AdminClient, job_id: str, round_: int) -> int:
    return sum(each.reported for each in admin.list_rounds(job_id) if each.round == round_)


def is_clean(host: Host) -> None:
    checked = host.run("verify", *host.shared)
    assert "nothing is broken" in checked
    assert "note:" not in checked


@contextlib.contextmanager
def two_hosts(tmp_path: Path, database: str, url: str, environment: Mapping[str, str]) -> Generator[tuple[Host, Host]]:
    """Two hosts, of which the first one leads."""
    one, two = (Host(tmp_path / name, database, url, environment) for name in ("one", "two"))
    one.run("init", "--database", database, "--host", "127.0.0.1")
    operator = msgspec.structs.replace(profile.load(one.folder / "admin.toml"), insecure=True)
    try:
        for host in (one, two):
            host.operator = msgspec.structs.replace(operator, server=host.address)
            host.start()
        yield one, two
    finally:
        one.end()
        two.end()


@pytest.mark.fault("F2", "F53")
@pytest.mark.parametrize("is_new", [False, True], ids=["the leader's", "both"])
def test_the_disks_of_hosts_are_lost_in_a_round(tmp_path: Path, database: str, s3: SeaweedFS, is_new: bool) -> None:
    """Two of four clients have reported when the leader burns; before that, the other host may have got a new disk."""
    url, work = s3.url(), Work(held=2)
    with two_hosts(tmp_path, database, url, s3.environment) as (one, two), two.admin() as admin:
        with at_training(admin, two.address, tmp_path, work) as job_id:
            processes.until(lambda: reported(admin, job_id, 2) == NUM_CLIENTS - 2, "two reports of the second round")
            if is_new:
                two.lose()
                two.make()
                two.start()
            before = admin.status()
            assert (before.gateway != "", before.leader_address) == (True, one.address)
            assert len(list(list_names(ObjectStore(url)))) == NUM_CLIENTS - 2
            one.lose()
            processes.until(lambda: leads(two), "the other one leads")
            assert reported(admin, job_id, 2) == NUM_CLIENTS - 2
            work.go_on.set()
            finish(admin, job_id, tmp_path, work)
        assert admin.status().term == before.term + 1
        processes.until(lambda: not list(list_names(ObjectStore(url))), "no copy is left")
        is_clean(two)


def leads(host: Host) -> bool:
    try:
        with host.admin() as admin:
            return not admin.status().gateway
    except FedplatError:
        return False


@pytest.mark.fault("F20", "F53")
def test_a_leader_that_wakes_up_removes_nothing(tmp_path: Path, database: str, s3: SeaweedFS) -> None:
    """It is stopped in a round, and continues when the next one has accepted reports of its own."""
    url, work = s3.url(), Work(held=2)
    with two_hosts(tmp_path, database, url, s3.environment) as (one, two), two.admin() as admin:
        with at_training(admin, two.address, tmp_path, work) as job_id:
            processes.until(lambda: reported(admin, job_id, 2) == NUM_CLIENTS - 2, "two reports of the second round")
            one.send(signal.SIGSTOP)
            processes.until(lambda: leads(two), "the other one leads")
            one.send(signal.SIGCONT)
            processes.until(lambda: is_gateway(one), "the old leader follows")
            assert len(list(list_names(ObjectStore(url)))) == NUM_CLIENTS - 2
            two.lose()  # the copies of an earlier leader are all that there is
            two.make()
            processes.until(lambda: leads(one), "the first one leads again")
            two.start()
            work.go_on.set()
            finish(admin, job_id, tmp_path, work)
        is_clean(one)


def is_gateway(host: Host) -> bool:
    try:
        with host.admin() as admin:
            return bool(admin.status().gateway)
    except FedplatError:
        return False


@pytest.mark.fault("F52")
def test_the_store_goes_away_in_a_round(tmp_path: Path, database: str, s3: SeaweedFS) -> None:
    """The SDK's clients come again until the store is back; no client trains twice, and the alert ends."""
    url, work = s3.url(), Work(held=NUM_CLIENTS)
    with contextlib.ExitStack() as stack:
        proxy = stack.enter_context(store_proxy(s3.endpoint))
        environment = {**s3.environment, "AWS_ENDPOINT_URL": proxy.endpoint}
        _, two = stack.enter_context(two_hosts(tmp_path, database, url, environment))
        admin = stack.enter_context(two.admin())
        with at_training(admin, two.address, tmp_path, work) as job_id:
            processes.until(lambda: len(work.trained) == 2 * NUM_CLIENTS, "the training of the second round")
            proxy.fail(AWAY)
            work.go_on.set()
            proxy.wait_for_failures(3 * NUM_CLIENTS)
            processes.until(lambda: "object_store_failing" in alerts(admin), "an alert")
            assert reported(admin, job_id, 2) == 0
            proxy.fail(None)
            finish(admin, job_id, tmp_path, work)
        assert "object_store_failing" not in alerts(admin)
        is_clean(two)


def alerts(admin: AdminClient) -> list[str]:
    return [alert.name for alert in admin.status().alerts]


@pytest.mark.fault("F52")
def test_a_wrong_key_ends_the_start_with_a_clear_error(tmp_path: Path, s3: SeaweedFS) -> None:
    environment = {**s3.environment, "AWS_SECRET_ACCESS_KEY": "wrong"}
    host = Host(tmp_path / "one", f"sqlite:///{tmp_path / 'fedplat.sqlite'}", s3.url(), environment)
    host.run("init", *host.shared[:2], "--host", "127.0.0.1")
    line = [str(processes.BIN / "fedplat-server"), "run", "--insecure", "--listen", host.address]
    line += ["--data-dir", str(host.folder), *host.shared]
    ended = subprocess.run(line, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    assert ended.returncode == 1
    said = ended.stderr.strip().splitlines()[-1]
    assert said.startswith("fedplat-server: reading s3://")
    assert "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in said
    assert "Traceback" not in ended.stderr
