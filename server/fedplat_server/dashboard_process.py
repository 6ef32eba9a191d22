"""The dashboard of a daemon: a child process, which is started again when it ends.

It is a client of the daemon's port, and has none of the daemon's secrets but the key of its certificate. Its death does
not affect the daemon; the daemon's death ends it, because its standard input closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import ipaddress
import os
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import msgspec

from fedplat.admin import Profile
from fedplat.extras import install_command
from fedplat_server import logs
from fedplat_server.auth import pki_folder
from fedplat_server.child_environment import child_environment
from fedplat_server.config import ServerConfig
from fedplat_server.errors import ConfigError

MODULE = "fedplat.dashboard.serving"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Pauses before the process is started again: each is twice as long, until it has run for `LONGEST_PAUSE_S`."""
STOP_S = 2.0
"""Time for the process to end by itself before it is killed."""


class DashboardOptions(msgspec.Struct, frozen=True):
    """What the process needs; the JSON form of its `ChildOptions`."""

    listen: str
    hosts: tuple[str, ...]
    profile: Profile
    certificate: str = ""
    key: str = ""


def missing_packages() -> list[str]:
    """Return the packages of the dashboard that are not installed."""
    return [name for name in ("jinja2", "starlette", "uvicorn") if importlib.util.find_spec(name) is None]


def check_installed() -> None:
    """Raise `ConfigError` if the packages of the dashboard are not installed."""
    if missing := missing_packages():
        raise ConfigError(f"--dashboard needs {', '.join(missing)}; install them with: {install_command('dashboard')}")


def make_options(config: ServerConfig, port: int) -> DashboardOptions:
    """Return the options of the dashboard of a daemon that listens on `port`.

    Raises `ConfigError` if the certificate is unreadable.
    """
    listen_host = config.listen.rpartition(":")[0].strip("[]")
    dashboard_host = config.dashboard_listen.rpartition(":")[0].strip("[]")
    if config.tls is None:
        address = f"{_bracket('127.0.0.1' if _is_any(listen_host) else listen_host)}:{port}"
        hosts = {*pki_folder.LOOPBACK, dashboard_host.lower()}
        return DashboardOptions(config.dashboard_listen, tuple(sorted(hosts)), Profile(server=address, insecure=True))
    names = pki_folder.hosts_of(pki_folder.read(config.tls.certificate)[0])
    ca = config.tls.ca.read_text() if config.tls.ca is not None else ""
    hosts = {name.lower() for name in names} | {dashboard_host.lower()}
    return DashboardOptions(
        config.dashboard_listen,
        tuple(sorted(hosts)),
        Profile(server=_own_address(config, port, listen_host, names), ca=ca),
        str(config.tls.certificate),
        str(config.tls.key),
    )


def _own_address(config: ServerConfig, port: int, host: str, names: list[str]) -> str:
    """Return an address of the daemon for which its certificate is valid, on loopback if possible."""
    loopback = [name for name in pki_folder.LOOPBACK if name in names]
    if loopback and (_is_any(host) or host in pki_folder.LOOPBACK):
        return f"{_bracket(host if host in loopback else loopback[0])}:{port}"
    if host in names or not (config.advertise or names):
        return f"{_bracket(host)}:{port}"
    if config.advertise:
        return config.advertise
    plain = [name for name in names if not name.startswith("*.")]
    return f"{_bracket((plain or names)[0])}:{port}"


def _is_any(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return host == "*"


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def supervise(options: DashboardOptions) -> None:
    """Run the process until cancelled; start it again with growing pauses when it has ended."""
    loop = asyncio.get_running_loop()
    pause_s = FIRST_PAUSE_S
    while True:
        began = loop.time()
        reason = await _run_once(options)
        if loop.time() - began > LONGEST_PAUSE_S:
            pause_s = FIRST_PAUSE_S
        logs.get().error("the dashboard has ended and will be started again", reason=reason, pause_s=pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(2.0 * pause_s, LONGEST_PAUSE_S)


async def _run_once(options: DashboardOptions) -> str:
    """Run the process until it ends; return why. It is stopped if this task is cancelled."""
    try:
        # In a process group of its own, so that Ctrl-C only reaches the daemon.
        command = (sys.executable, "-P", "-m", MODULE)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, cwd=Path("/"), env=child_environment(os.environ), process_group=0
        )
    except OSError as exc:
        return f"it could not be started: {exc.strerror}"
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(options) + b"\n")
            await process.stdin.drain()
        line = await process.stdout.readline()
        if line.strip().isdigit():
            scheme = "https" if options.certificate else "http"
            logs.get().info("the dashboard is ready", port=int(line), scheme=scheme, process=process.pid)
        return f"exit status {await process.wait()}"
    finally:
        await _stop(process)


async def _stop(process: Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(asyncio.shield(process.wait()), STOP_S)
    except (TimeoutError, asyncio.CancelledError):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
