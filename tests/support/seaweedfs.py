"""A real S3 server for tests: SeaweedFS, in its own process and folder."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import BaseError

from support import process_logs
from support.polling import BIN, until
from support.ports import free_port

BUCKET = "fed"
_KEYS = {"AWS_ACCESS_KEY_ID": "fedplat-tests", "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-tests"}
_PORTS = ("admin.port", "filer.port", "master.port", "s3.port", "volume.port")
_OFF = ("admin.ui", "master.telemetry", "s3.autoCreateBucket", "webdav")
_TRIES = 5
_numbers = itertools.count()


class SeaweedFS:
    """A server with one bucket. SIGKILL ends it: an orderly end takes 12 seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: dict[str, int] = {}

    @property
    def endpoint(self) -> str:
        """The address of the S3 API."""
        return f"http://127.0.0.1:{self._ports['s3.port']}"

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables of a process that uses the server."""
        return {**_KEYS, "AWS_ENDPOINT_URL": self.endpoint, "AWS_REGION": "us-east-1"}

    def url(self) -> str:
        """A prefix that no other test has."""
        return f"s3://{BUCKET}/{os.getpid()}-{next(_numbers)}"

    def start(self) -> None:
        """Start it; if it ran before, on the same ports and with the same content."""
        for _ in range(_TRIES):  # another process may take a port that was free
            if not self._ports:
                self._ports = {name: port for each in _PORTS for name, port in _choose(each)}
            if self._start():
                return
            self._ports = {}
        raise AssertionError("SeaweedFS does not start")

    def kill(self) -> None:
        """End it at once. It keeps what it acknowledged."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> bool:
        options = [f"-{name}={port}" for name, port in self._ports.items()] + [f"-{name}=false" for name in _OFF]
        options += ["-s3.port.iceberg=0", "-s3.port.lance=0", f"-bucket={BUCKET}", f"-dir={self._folder}"]
        command = [str(BIN / "weed"), "mini", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *options]
        environment = {**os.environ, **_KEYS}
        with process_logs.open_log(self._folder / "log") as log:
            process = subprocess.Popen(
                command, cwd=self._folder, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        self._process = process
        store = obstore.store.S3Store(
            BUCKET,
            config={
                "access_key_id": _KEYS["AWS_ACCESS_KEY_ID"],
                "secret_access_key": _KEYS["AWS_SECRET_ACCESS_KEY"],
                "endpoint": self.endpoint,
                "region": "us-east-1",
            },
            client_options={"allow_http": True, "timeout": "5s"},
            retry_config={"max_retries": 0},
        )
        until(lambda: process.poll() is not None or _answers(store), "the S3 server")
        if process.poll() is None:
            return True
        self._process = None
        return False


def _choose(name: str) -> Generator[tuple[str, int]]:
    yield name, free_port()
    yield f"{name}.grpc", free_port()


def _answers(store: obstore.store.S3Store) -> bool:
    try:
        store.put("ready", b"", use_multipart=False)
    except (BaseError, FileNotFoundError):  # the bucket is made last
        return False
    return True


@contextlib.contextmanager
def s3_server() -> Generator[SeaweedFS]:
    """A server that ends with the block."""
    with tempfile.TemporaryDirectory(prefix="fedplat-s3-") as folder:
        server = SeaweedFS(Path(folder))
        try:
            server.start()
            yield server
        finally:
            server.kill()


@pytest.fixture(scope="session")
def seaweedfs() -> Generator[SeaweedFS]:
    """One server for the tests of a process."""
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> SeaweedFS:
    """The server, with its variables in the environment of this process and of those that the test starts."""
    for name, value in seaweedfs.environment.items():
        monkeypatch.setenv(name, value)
    return seaweedfs
