"""Running the daemon in this process, for the commands `run` and `dev`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from fedplat.wire import process_tuning
from fedplat_server import logs
from fedplat_server.cli import open_files, tracing
from fedplat_server.config import ServerConfig
from fedplat_server.daemon import Daemon, stop_on_signals
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
    tracer = tracing.open_tracing(traces)
    log = logs.configure(log_level, json=json_log, processors=[ids.add_ids] if tracer is not None else ())
    process_tuning.reuse_message_memory()
    daemon = Daemon(config, count_dropped_lines=lambda: log.num_dropped, tracing=tracer)
    try:
        asyncio.run(_serve(daemon, tracer, on_started))
    finally:
        log.finish(timeout_s=1.0)


async def _serve(daemon: Daemon, tracer: Tracing | None, on_started: Callable[[], object]) -> None:
    open_files.raise_limit()
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
