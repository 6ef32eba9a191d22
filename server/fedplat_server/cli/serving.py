"""Running the daemon in this process, for the commands `run` and `dev`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fedplat.extras import install_command
from fedplat.wire import process_tuning
from fedplat_server import logs
from fedplat_server.config import ServerConfig
from fedplat_server.daemon import Daemon, stop_on_signals
from fedplat_server.errors import ConfigError
from fedplat_server.tracing import ids

if TYPE_CHECKING:
    from fedplat_server.tracing.provider import Tracing


def serve(
    config: ServerConfig,
    log_level: str,
    json_log: bool | None,
    on_started: Callable[[], object] = lambda: None,
    traces: str = "",
) -> None:
    """Run the daemon until SIGTERM or Ctrl-C; call `on_started` when it answers calls.

    `traces` is the URL of the receiver of traces; empty: no traces.
    """
    tracer = open_tracing(traces)
    log = logs.configure(log_level, json=json_log, processors=[ids.add_ids] if tracer is not None else ())
    process_tuning.reuse_message_memory()
    daemon = Daemon(config, count_dropped_lines=lambda: log.num_dropped, tracing=tracer)
    try:
        asyncio.run(_serve(daemon, tracer, on_started))
    finally:
        log.finish(timeout_s=1.0)


async def _serve(daemon: Daemon, tracer: Tracing | None, on_started: Callable[[], object]) -> None:
    raise_open_file_limit()
    process_tuning.keep_what_is_loaded()
    try:
        with stop_on_signals(daemon.stop):
            await _run(daemon, on_started)
    finally:
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
    logs.get().info("the server has stopped")


async def _run(daemon: Daemon, on_started: Callable[[], object]) -> None:
    announcement = asyncio.create_task(_announce(daemon, on_started), name="announcement")
    try:
        await daemon.run()
    finally:
        announcement.cancel()
        await asyncio.wait([announcement])
    if not announcement.cancelled():
        announcement.result()


async def _announce(daemon: Daemon, on_started: Callable[[], object]) -> None:
    await daemon.started.wait()
    on_started()


VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""The variables of OpenTelemetry that name the receiver if `--traces` does not."""
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def open_tracing(url: str, environment: Mapping[str, str] = os.environ) -> Tracing | None:
    """Return the tracing to a receiver; None without a URL, or if OpenTelemetry is disabled by its own variables.

    Raises `ConfigError`. OpenTelemetry is imported only if there is a receiver.
    """
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not url or is_disabled or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    _check_url(url)
    for name in _PROTOCOLS:
        if (protocol := environment.get(name, "grpc")) != "grpc":
            raise ConfigError(
                f"{name} is {protocol}; the server sends traces by gRPC only: unset it, or set it to grpc"
            )
    try:
        from fedplat_server.tracing.provider import Tracing
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"--traces needs the Python package {exc.name}; install it with {install_command('otel')}, or "
            f"leave out --traces (and unset {' and '.join(VARIABLES)})"
        ) from exc
    try:
        return Tracing.open(url)
    except ValueError as exc:  # such as OTEL_EXPORTER_OTLP_TIMEOUT=soon
        raise ConfigError(f"a variable OTEL_... is not valid ({exc}); correct it, or unset it") from exc


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is not a number
        raise ConfigError("--traces: the port is not a number; expected a URL such as http://127.0.0.1:4317") from None
    if parts.username is not None or parts.password is not None:  # the text is not repeated: it has a password
        raise ConfigError("--traces has a user or a password; set OTEL_EXPORTER_OTLP_HEADERS instead")
    if not is_valid or parts.path not in ("", "/") or parts.query:
        raise ConfigError(
            f"--traces {url}: expected the URL of an OTLP/gRPC receiver, such as http://127.0.0.1:4317 or "
            "https://collector.example:4317"
        )


MIN_OPEN_FILES = 8192
"""The daemon warns below this limit, which also includes the files of transfers and of the database."""


def raise_open_file_limit() -> int:
    """Raise the limit of open files to the hard limit and return it; warn if it is below `MIN_OPEN_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The default is often 1,024, for programs that use select(); asyncio and gRPC do not. macOS reports an unlimited
    # hard limit, but refuses to set it.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        logs.get().warning(
            "the limit of open files is low: few clients can connect",
            limit=soft,
            mend=f"raise the hard limit to {MIN_OPEN_FILES}: LimitNOFILE= (systemd), ulimit -Hn, "
            "--ulimit nofile= (docker)",
        )
    return soft
