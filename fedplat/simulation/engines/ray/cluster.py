"""The Ray cluster of this process: an existing one, or a local one that this process starts and its last user ends.

Members of a cluster exchange pickled objects: any program that can reach its ports can run code on all its machines.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Generator
from typing import Any

from fedplat import errors, extras

_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}
"""Settings against usage reports to Ray's developers, and against warnings that do not apply here."""
_FOR_MODELS = 1 << 30
"""Bytes of a local cluster's object store for versions and updates; what does not fit is written to disk."""
_MAX_MEMORY_SHARE = 0.3
"""The largest part of this machine's memory that a local cluster uses for objects."""


class _State:
    """The number of engines of this process that use Ray; `home` is the folder of a local cluster's files."""

    users = 0
    home: tempfile.TemporaryDirectory[str] | None = None


class Cluster:
    """One use of this process's cluster: the one at `address` or RAY_ADDRESS, or a local one.

    A local cluster has room for `data_bytes` of data. Raises `MissingExtraError` without Ray, and `EngineError` if
    there is no cluster at the address or it has too few cores.
    """

    def __init__(self, num_workers: int, data_bytes: int, address: str | None = None) -> None:
        self.ray = _import_ray()
        address = address or os.environ.get("RAY_ADDRESS")
        if not self.ray.is_initialized():
            with _restored_settings():
                self._join(address) if address else self._start(num_workers or _cores(), data_bytes)
        _State.users += 1
        self._is_left = False
        self.is_own = _State.home is not None
        self.num_workers = num_workers or (_cores() if self.is_own else max(1, self._cpus()))
        if not self.is_own and self.num_workers > self._cpus():
            self.leave()
            raise errors.EngineError(
                f'engine = "ray": the cluster has {self._cpus()} cores; expected at least one for each of '
                f"{self.num_workers} workers. Use fewer workers, or 0 for as many as there are cores"
            )

    def leave(self) -> None:
        """End this use, and the cluster if it is local and has no other user."""
        if self._is_left:
            return
        self._is_left = True
        _State.users -= 1
        if not _State.users and _State.home is not None:
            self.ray.shutdown()
            _State.home.cleanup()
            _State.home = None

    def _cpus(self) -> int:
        return int(self.ray.cluster_resources().get("CPU", 0))

    def _join(self, address: str) -> None:
        try:
            self.ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, OSError) as exc:
            reason = str(exc).strip().partition("\n")[0]
            raise errors.EngineError(
                f'engine = "ray": no Ray cluster answers at {address}: {reason}. Start one with `ray start --head`, or '
                "unset RAY_ADDRESS to use only this machine"
            ) from exc

    def _start(self, num_workers: int, data_bytes: int) -> None:
        # A short name: Ray creates sockets in this folder, and the path of a socket has at most 107 bytes.
        home = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        try:
            self.ray.init(
                address="local",
                num_cpus=num_workers,
                num_gpus=0,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=int(min(data_bytes + _FOR_MODELS, _MAX_MEMORY_SHARE * memory)),
                _temp_dir=home.name,
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as exc:
            home.cleanup()
            raise errors.EngineError(f'engine = "ray": Ray could not be started: {exc}') from exc
        _State.home = home


def _import_ray() -> Any:
    with _restored_settings():
        try:
            import ray  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as exc:
            raise errors.MissingExtraError(
                f'engine = "ray" needs Ray; install it with: {extras.install_command("ray")}, or use "processes"'
            ) from exc
    return ray


def _cores() -> int:
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def _restored_settings() -> Generator[None]:
    """Set `_QUIET` in the environment, where Ray reads it; restore it and the SIGTERM handler, which Ray replaces."""
    before = {name: os.environ.get(name) for name in _QUIET}
    os.environ.update(_QUIET)
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if is_main and handler is not None:
            signal.signal(signal.SIGTERM, handler)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
