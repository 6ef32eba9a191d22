"""Commands beside a scripted server, in this process or in one of their own, and what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from click.testing import Result

from support.cli.fake_admin import FakeServer

Run = Callable[..., Result]
FEDPLAT = [sys.executable, "-W", "error", "-m", "fedplat.cli"]
TOKEN = "fedplat_op_" + "t" * 43


def environment(server: FakeServer) -> dict[str, str]:
    """The variables that name the server, which has no TLS."""
    return environment_for(server.address)


def environment_for(address: str) -> dict[str, str]:
    """The variables that name a server without TLS, and none of the profile that this machine's user may have."""
    return {
        "FEDPLAT_SERVER": address,
        "FEDPLAT_INSECURE": "1",
        "FEDPLAT_TOKEN": TOKEN,
        "XDG_CONFIG_HOME": os.devnull,
    }


def start(server: FakeServer, *arguments: str) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    return subprocess.Popen(
        [*FEDPLAT, *arguments],
        env={**os.environ, **environment(server)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def parsed(result: Result) -> Any:
    """The JSON of a command that succeeded: one line, and nothing else on either stream."""
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)
