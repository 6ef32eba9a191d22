"""Work and watches through what stands before servers: nginx and HAProxy, as docs/operations.md sets them up.

Their limits of time are seconds here, so that they end many waits of each caller.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
from collections.abc import Generator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fedplat.admin import AdminClient
from fedplat.errors import ServerRefusedError
from fedplat.model import Parameters
from fedplat_client import Client, Task, TrainResult
from fedplat_client.task import TrainFunction
from support import deployment, processes, programs
from support.clients import at_work
from support.docs import blocks
from support.jobs import write_job

pytestmark = pytest.mark.slow

ENDED_BY_HAPROXY = re.compile(r" [cs]D ")
"""The state of a connection at its end, in its log: a limit of time for the caller's or the server's side."""
ENDED_BY_NGINX = " 504 "
LIMIT = "3s"
NUM_WAITS = 2
LARGE = Parameters.from_arrays({"weight": np.zeros(700_000, np.float32)})
"""A model above the limit that nginx has for a request."""


def documented(first_line: str) -> str:
    """A configuration of the page, with other limits of time."""
    found = [block.text for block in blocks.read("docs/operations.md") if block.text.startswith(first_line)]
    assert len(found) == 1, first_line
    text, replaced = re.subn(r"\b1h\b", LIMIT, found[0])
    assert replaced == 2
    return text


class Middlebox:
    """A program between callers and the server, at an address of its own."""

    def __init__(self, server: processes.Server, log: Path) -> None:
        self.server = server
        self.address = f"127.0.0.1:{processes.free_port()}"
        self.log = log

    def admin(self) -> AdminClient:
        """An operator who reaches the server through it."""
        return AdminClient(msgspec.structs.replace(self.server.profile, server=self.address))

    def client(self, population: str, folder: Path, train: TrainFunction) -> Client:
        """A client that reaches the server through it."""
        with self.server.admin() as admin:
            ticket = admin.create_enrollment(population, 1, 3600.0, self.address).ticket
        client = Client.from_ticket(ticket, data_dir=folder / "client")
        client.add_trainer("toy", train)
        return client

    def num_ended(self, pattern: str | re.Pattern[str]) -> int:
        """How many calls or connections it has ended in this way, by its log."""
        return len(re.findall(pattern, self.log.read_text()))


def add_one(task: Task) -> TrainResult:
    task.parameters["weight"] += 1
    return TrainResult(parameters=task.parameters, num_examples=1)


@contextlib.contextmanager
def nginx(server: processes.Server, folder: Path, limit: str) -> Generator[Middlebox]:
    """nginx, which ends TLS, with the documented settings; `limit` replaces the line with the limit of a request."""
    box = Middlebox(server, folder / "access.log")
    block = documented("server {").replace("10.0.0.2:7443", server.address).replace("client_max_body_size 0;", limit)
    block = block.replace("listen 7443", f"listen {box.address}").replace("/var/lib/fedplat", str(server.folder))
    text = f"""
        daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log; events {{}}
        http {{
            access_log {box.log}; client_body_temp_path {folder}/body; proxy_temp_path {folder}/a;
            fastcgi_temp_path {folder}/b; uwsgi_temp_path {folder}/c; scgi_temp_path {folder}/d;
            {block}
        }}
    """
    file = folder / "nginx.conf"
    file.write_text(text)
    command = [programs.require("nginx"), "-e", str(folder / "error.log"), "-p", str(folder), "-c", str(file)]
    with running(box, command):
        yield box


@contextlib.contextmanager
def haproxy(server: processes.Server, folder: Path) -> Generator[Middlebox]:
    """HAProxy, which forwards bytes, with the documented settings."""
    box = Middlebox(server, folder / "haproxy.log")
    text = documented("frontend fedplat").replace("10.0.0.2:7443", server.address)
    text = text.replace("bind :7443", f"bind {box.address}\n    option tcplog\n    log stdout format raw local0")
    file = folder / "haproxy.cfg"
    file.write_text(text)
    with running(box, [programs.require("haproxy"), "-db", "-f", str(file)]):
        yield box


@contextlib.contextmanager
def running(box: Middlebox, command: list[str]) -> Generator[None]:
    """The program runs, and answers."""
    with processes.processes([command], box.log):
        with box.admin() as admin:
            admin.wait_until_ready(processes.PATIENCE_S)
        yield


@contextlib.contextmanager
def watching(box: Middlebox, job: str) -> Generator[subprocess.Popen[str]]:
    """An operator's `fedplat job watch`, in a process of its own."""
    command = [str(processes.BIN / "fedplat"), "job", "watch", job, "--server", box.address]
    environment = {**os.environ, "FEDPLAT_PROFILE": str(box.server.profile_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def test_haproxy_ends_waits_and_neither_clients_nor_watches_notice(
    server: processes.Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with haproxy(server, tmp_path) as box:
        completes_while_waits_are_ended(box, "haproxy", ENDED_BY_HAPROXY, tmp_path, caplog)


def test_nginx_ends_waits_and_neither_clients_nor_watches_notice(
    server: processes.Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with nginx(server, tmp_path, "client_max_body_size 0;") as box:
        completes_while_waits_are_ended(box, "nginx", ENDED_BY_NGINX, tmp_path, caplog)
        assert box.num_ended(" 413 ") == 0


def completes_while_waits_are_ended(
    box: Middlebox, name: str, ended: str | re.Pattern[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Waits are ended while a client has no work, and while it trains under the eyes of an operator."""
    text = write_job(name, population=name, trainer="toy", rounds=2)
    trained = threading.Event()

    def train(task: Task) -> TrainResult:
        trained.wait(processes.PATIENCE_S)
        return add_one(task)

    client = box.client(name, folder, train)
    with box.server.admin() as admin, at_work([client]):
        processes.until(lambda: box.num_ended(ended) >= NUM_WAITS, "waits without work that end")
        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []
        job = deployment.submit(admin, text, LARGE)
        before = box.num_ended(ended)
        with watching(box, job) as watch:
            processes.until(lambda: box.num_ended(ended) >= before + NUM_WAITS, "waits in a round that end")
            trained.set()
            said, _ = watch.communicate(timeout=processes.PATIENCE_S)
        assert (watch.returncode, "cannot" in said) == (0, False), said
        np.testing.assert_array_equal(deployment.exported(admin, job, folder)["weight"], 2)


def test_the_limit_of_nginx_for_a_request_is_named_and_an_update_passes_it(
    server: processes.Server, tmp_path: Path
) -> None:
    with nginx(server, tmp_path, "") as box, box.admin() as through, server.admin() as direct:
        text = write_job("limit", population="limit", trainer="toy")
        with pytest.raises(ServerRefusedError, match=r"a proxy or load balancer .* HTTP status 413"):
            deployment.submit(through, text, LARGE)
        with at_work([box.client("limit", tmp_path, add_one)]):
            deployment.completed(direct, deployment.submit(direct, text, LARGE))
        assert box.num_ended(" 413 ") > 1
