"""A real deployment on this machine, for benchmarks: a server daemon and client processes over loopback."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

from fedplat.cli import profile
from fedplat.cli.admin import AdminClient

BIN = Path(sys.executable).parent
HERE = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A server and clients that wait for work."""

    address: str
    folder: Path
    population: str = "bench"

    def admin(self) -> AdminClient:
        """An operator of role admin."""
        return AdminClient(profile.load(self.folder / "admin.toml"))


@contextlib.contextmanager
def deploy(folder: Path, num_clients: int) -> Generator[Deployment]:
    """Starts a server and `num_clients` no-op clients, each a process; ends them all."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    deployment = Deployment(address, folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"}
    server = str(BIN / "fedplat-server")
    init = [server, "init", "--data-dir", str(folder), "--host", "127.0.0.1", "--port", address.rpartition(":")[2]]
    if subprocess.run(init, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit("the server could not be set up; see above")
    running: list[subprocess.Popen[bytes]] = []

    def start(command: list[str]) -> None:
        running.append(subprocess.Popen(command, cwd=HERE, env=environment, stdin=subprocess.DEVNULL))

    try:
        start([server, "run", "--listen", address, "--data-dir", str(folder), "--log-level", "warning"])
        with deployment.admin() as admin:
            admin.wait_until_ready(30.0)
            ticket = folder / "ticket"
            ticket.write_text(admin.create_enrolment(deployment.population, num_clients, 600.0, address).ticket)
            for index in range(num_clients):
                client = [str(BIN / "fedplat-client"), "run", "--ticket-file", str(ticket)]
                client += ["--trainer", "noop=noop:train", "--data-dir", str(folder / f"client-{index}")]
                start([*client, "--log-level", "warning"])
            while admin.status().num_waiting < num_clients:
                if any(process.poll() is not None for process in running):
                    raise SystemExit("a process of the deployment ended; see above")
                time.sleep(0.05)
        yield deployment
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait()
