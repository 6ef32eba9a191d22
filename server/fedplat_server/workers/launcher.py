"""Starts the ranks of a pool with torchrun, which restarts them when one has died."""

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

from fedplat import forks
from fedplat.pytorch.distributed import Backend
from fedplat_server.errors import ConfigError, PoolError
from fedplat_server.workers import protocol, torchrun


class LaunchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options to start a pool on this host.

    `hosts` is the minimum and maximum number of hosts in a group. They meet at `rendezvous` (HOST:PORT), reach this
    host at `address`, and are numbered in the order of their addresses. After a rank died, the group is restarted up to
    `max_restarts` times. `threads` is the number of PyTorch threads in each rank.
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


def default_num_ranks() -> int:
    """Return the number of GPUs; without GPUs, half the number of usable CPU cores (at least 1)."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return max(1, len(os.sched_getaffinity(0)) // 2)


def run(options: LaunchOptions) -> None:
    """Run a pool until a signal stops it.

    Raises `ConfigError` if another pool serves the data folder, or NCCL is requested without a GPU; `PoolError` if the
    hosts cannot reach each other, or the ranks died too often.
    """
    import torch

    if options.backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError("--backend nccl: this machine has no GPU that PyTorch can use; expected auto or gloo")
    with _lock(options), tempfile.TemporaryDirectory(prefix="fedplat-pool-") as folder:
        protocol.create_key(options.data_dir)
        os.environ |= {"OMP_NUM_THREADS": str(options.threads), **protocol.RANK_ENVIRONMENT}
        socket = protocol.socket_path(options.data_dir)
        arguments = ["-P", "-m", "fedplat_server.workers.rank", str(socket), options.backend, options.log_level]
        if options.hosts == (1, 1):
            arguments.append(folder)
            rendezvous = torchrun.meet_on_one_host(Path(folder))
        else:
            rendezvous = torchrun.meet_over_network(options.rendezvous, options.address)
        config = torchrun.make_config(options.num_ranks, rendezvous, options.hosts, options.max_restarts)
        try:
            torchrun.elastic_launch(config, sys.executable)(*arguments)
        except torchrun.SignalException as exc:
            if exc.sigval == signal.SIGINT:
                raise KeyboardInterrupt from exc
        except torchrun.RendezvousError as exc:
            raise PoolError(
                f"the hosts of the pool cannot reach each other ({exc}); check that the pool at {options.rendezvous} "
                "is running and that this host can connect to it"
            ) from exc
        except torchrun.ChildFailedError as exc:
            [rank, failure] = exc.get_first_failure()
            raise PoolError(
                f"the ranks died {options.max_restarts + 1} times, at last rank {rank} with exit status "
                f"{failure.exitcode}; see their log for the reason"
            ) from exc
        finally:
            socket.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(options: LaunchOptions) -> Generator[None]:
    """Lock the data folder for one pool; the launchers of a pool of several hosts share the lock."""
    try:
        descriptor = os.open(options.data_dir / "pool.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise ConfigError(
            f"{options.data_dir} cannot be written to ({exc.strerror}); name the daemon's data folder with --data-dir"
        ) from exc
    with forks.keep_descriptor(descriptor):
        kind = fcntl.LOCK_EX if options.hosts == (1, 1) else fcntl.LOCK_SH
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except OSError as exc:
            raise ConfigError(f"another pool serves {options.data_dir}; stop it first") from exc
        yield
