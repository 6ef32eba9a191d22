"""Starts the ranks of a pool with torchrun, and sees to it that there always are some."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import msgspec

from fedplat.backends.ranks import Backend
from fedplat.errors import MissingExtraError
from fedplat_server.errors import ConfigError, PoolError
from fedplat_server.pool import address, keys, meeting

try:
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
except ImportError as exc:
    raise MissingExtraError("a pool needs PyTorch, which is not installed: pip install 'fedplat-server[pool]'") from exc


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How a pool is started on this host.

    `hosts` are the fewest and the most that form a group; they meet at `rendezvous` (HOST:PORT), and know this one by
    `address`, in whose order hosts are numbered. A group whose ranks died is formed again `max_restarts` times.
    `threads`: those of PyTorch in each rank.
    """

    data_dir: Path
    num_ranks: int
    backend: Backend = "auto"
    hosts: tuple[int, int] = (1, 1)
    rendezvous: str = "127.0.0.1:0"
    address: str = "127.0.0.1"
    max_restarts: int = 1000
    threads: int = 1
    log_level: str = "INFO"


def default_ranks() -> int:
    """One rank for each GPU; without any, for each two cores."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return max(1, len(os.sched_getaffinity(0)) // 2)


def run(options: Options) -> None:
    """Runs a pool until it is stopped by a signal.

    Raises `ConfigError` when another pool serves the data folder, or when there is no GPU for NCCL; `PoolError` when
    ranks cannot be started, or died too often.
    """
    if options.backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError("--backend nccl: this machine has no GPU that PyTorch can use; expected auto or gloo")
    with _held(options), tempfile.TemporaryDirectory(prefix="fedplat-pool-") as folder:
        keys.make(options.data_dir)
        os.environ |= {"OMP_NUM_THREADS": str(options.threads), "PYTHONSAFEPATH": "1"}
        socket = address.of_folder(options.data_dir)
        arguments = ["-P", "-m", "fedplat_server.pool.rank", str(socket), options.backend, options.log_level]
        if options.hosts == (1, 1):
            arguments.append(folder)
        try:
            elastic_launch(_config(options, Path(folder)), sys.executable)(*arguments)
        except SignalException as exc:
            if exc.sigval == signal.SIGINT:
                raise KeyboardInterrupt from exc
        except RendezvousError as exc:
            raise PoolError(
                f"the hosts of the pool do not find together ({exc}); does the one at {options.rendezvous} run, can "
                "it be reached?"
            ) from exc
        except ChildFailedError as exc:
            [rank, failure] = exc.get_first_failure()
            raise PoolError(
                f"the ranks died {options.max_restarts + 1} times, at last rank {rank} with exit status "
                f"{failure.exitcode}; what they logged says why"
            ) from exc
        finally:
            socket.unlink(missing_ok=True)


def _config(options: Options, folder: Path) -> LaunchConfig:
    if options.hosts == (1, 1):
        how = meeting.on_one_host(folder)
    else:
        how = meeting.over_network(options.rendezvous, options.address)
    return LaunchConfig(
        min_nodes=options.hosts[0],
        max_nodes=options.hosts[1],
        nproc_per_node=options.num_ranks,
        run_id="fedplat",
        max_restarts=options.max_restarts,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(),
        **how,
    )


@contextlib.contextmanager
def _held(options: Options) -> Generator[None]:
    """One pool for each data folder; those of several hosts that form one share it."""
    try:
        descriptor = os.open(options.data_dir / "pool.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise ConfigError(
            f"{options.data_dir} cannot be written to ({exc.strerror}); name the daemon's data folder with --data-dir"
        ) from exc
    try:
        kind = fcntl.LOCK_EX if options.hosts == (1, 1) else fcntl.LOCK_SH
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except OSError as exc:
            raise ConfigError(f"another pool serves {options.data_dir}; stop it first") from exc
        yield
    finally:
        os.close(descriptor)
