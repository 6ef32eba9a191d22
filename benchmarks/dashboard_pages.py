"""A dashboard of a deployment, and a session of it, as a browser has one."""

from __future__ import annotations

import contextlib
import http.client
import subprocess
import urllib.parse
from collections.abc import Generator
from http import HTTPStatus

import psutil

from deployment import BIN, Deployment
from processes import FailedError, free_port


class Pages:
    """The pages at an address, with the cookie of a session."""

    def __init__(self, address: str, process: psutil.Process) -> None:
        self.process = process
        self._address = address
        self._cookie = ""

    def sign_in(self, code: str) -> None:
        """Begin a session with the code that the dashboard printed."""
        connection = http.client.HTTPConnection(self._address)
        headers = {"Origin": f"http://{self._address}", "Content-Type": "application/x-www-form-urlencoded"}
        with contextlib.closing(connection):
            connection.request("POST", "/login", urllib.parse.urlencode({"code": code}), headers)
            self._cookie = (connection.getresponse().getheader("Set-Cookie") or "").partition(";")[0]

    @contextlib.contextmanager
    def open(self, path: str) -> Generator[http.client.HTTPResponse]:
        """Request a page. Raises `FailedError` if it is not there."""
        connection = http.client.HTTPConnection(self._address)
        with contextlib.closing(connection):
            connection.request("GET", path, headers={"Cookie": self._cookie})
            with connection.getresponse() as response:
                if response.status != HTTPStatus.OK:
                    raise FailedError(f"the dashboard answered {response.status} for {path}")
                yield response

    def read_updates(self, path: str) -> None:
        """Read the live updates of a page until the dashboard ends."""
        with self.open(f"{path}?live=1") as response, contextlib.suppress(http.client.HTTPException, OSError):
            while response.read1(2**16):
                pass


@contextlib.contextmanager
def dashboard(deployment: Deployment) -> Generator[Pages]:
    """Run `fedplat dashboard` for a deployment on this machine."""
    address = f"127.0.0.1:{free_port()}"
    options = ("dashboard", "--listen", address, "--no-browser")
    process = psutil.Popen(
        [str(BIN / "fedplat"), "--profile", str(deployment.folder / "admin.toml"), *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        pages = Pages(address, process)
        pages.sign_in(process.stdout.readline().strip().partition("code=")[2])
        yield pages
    finally:
        process.terminate()
        process.wait()
