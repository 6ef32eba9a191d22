"""The launcher that started this process as one of several ranks: torchrun, Open MPI's mpirun, or Slurm's srun.

Each sets the number of the rank in the environment, under names of its own. torchrun also gives the ranks a key-value
store to meet at. Under the others rank 0 opens one (`open_store`), at MASTER_ADDR and MASTER_PORT, or at:

- the loopback of the host, which no other host can reach, if all ranks are on one host;
- otherwise, with srun, the first host of SLURM_STEP_NODELIST. mpirun does not name the host of rank 0.
- with a port between 20000 and 29999 that follows from the number of the job, so that two jobs have different ones.

PyTorch's store answers everyone who can connect, without a password, and several hosts reach it on all networks of rank
0's host. So ranks of several hosts need a network of their own. With one host, every user of the host can connect.
"""

from __future__ import annotations

import datetime
import itertools
import os
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import distributed

Launcher: TypeAlias = Literal["torchrun", "mpirun", "srun"]
LOOPBACK = "127.0.0.1"
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000  # below the ports that Linux gives to outgoing connections


@dataclass(frozen=True, kw_only=True)
class LaunchedRank:
    """This process's place among the processes that a launcher started."""

    launcher: Launcher
    rank: int
    size: int
    local_rank: int
    """The rank's number on its host."""
    local_size: int
    """The number of ranks on this host."""
    address: str = ""
    """The host of rank 0; empty if the launcher does not name it."""
    port: int = 0

    def __post_init__(self) -> None:
        if self.rank >= self.size or self.local_size > self.size:
            raise ValueError(
                f"{self.launcher} started this process as rank {self.rank} of {self.size}, with {self.local_size} on "
                "this host; expected a rank below the number of ranks, and no more ranks here than in all"
            )
        if self.port >= 2**16:
            raise ValueError(f"MASTER_PORT = {self.port}: expected a port below 65536")

    @property
    def is_on_one_host(self) -> bool:
        """True if all ranks are on this host."""
        return self.local_size == self.size


def find_rank(environment: Mapping[str, str] | None = None) -> LaunchedRank | None:
    """Return the rank of this process; None if no launcher started it. Raises `ValueError` for a wrong variable.

    A program that mpirun or srun starts on a node may be torchrun itself, so torchrun's variables come first. In a job
    of Slurm, mpirun starts its own helpers with srun, so Slurm's come last.
    """
    names = os.environ if environment is None else environment
    if "RANK" in names:
        return _from_torchrun(names)
    if "OMPI_COMM_WORLD_RANK" in names:
        return _from_open_mpi(names)
    # A script of sbatch has SLURM_PROCID, too; only a step has a list of nodes.
    if "SLURM_PROCID" in names and "SLURM_STEP_NODELIST" in names:
        return _from_slurm(names)
    return None


def open_store(place: LaunchedRank, timeout_s: float) -> Any:
    """Return the store where all ranks meet, which rank 0 opens. For mpirun and srun.

    Raises `ValueError` if the address of rank 0 is not known, or its port is not free.
    """
    if not place.address:
        raise ValueError(
            f"{place.launcher} started ranks on several hosts, and does not name that of rank 0; set MASTER_ADDR "
            f"to the name of that host, such as: mpirun -x MASTER_ADDR=HOST"
        )
    listener = _listen(place) if place.rank == 0 else None
    return distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        place.address,
        place.port,
        place.size,
        is_master=listener is not None,
        timeout=datetime.timedelta(seconds=timeout_s),
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _listen(place: LaunchedRank) -> socket.socket:
    """Return the socket of the store. PyTorch itself would listen on all networks, also for ranks of one host."""
    try:
        return socket.create_server((place.address if place.is_on_one_host else "", place.port), backlog=1024)
    except OSError as exc:
        raise ValueError(
            f"rank 0 cannot listen at {place.address}:{place.port} ({exc.strerror}); set MASTER_PORT to a free port, "
            "the same for all ranks"
        ) from exc


def _from_torchrun(names: Mapping[str, str]) -> LaunchedRank:
    # Programs that set only RANK and WORLD_SIZE are on one host with a rank for each GPU, or do not use GPUs.
    return LaunchedRank(
        launcher="torchrun",
        rank=_read(names, "RANK"),
        size=_read(names, "WORLD_SIZE", default=1),
        local_rank=_read(names, "LOCAL_RANK", default=0),
        local_size=_read(names, "LOCAL_WORLD_SIZE", default=1),
        address=names.get("MASTER_ADDR", ""),
        port=_read(names, "MASTER_PORT", default=0),
    )


def _from_open_mpi(names: Mapping[str, str]) -> LaunchedRank:
    size = _read(names, "OMPI_COMM_WORLD_SIZE")
    local_size = _read(names, "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = names.get("OMPI_MCA_ess_base_jobid") or names.get("PMIX_NAMESPACE", "")
    return LaunchedRank(
        launcher="mpirun",
        rank=_read(names, "OMPI_COMM_WORLD_RANK"),
        size=size,
        local_rank=_read(names, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=local_size,
        address=names.get("MASTER_ADDR") or (LOOPBACK if local_size == size else ""),
        port=_read(names, "MASTER_PORT", default=_derive_port(job)),
    )


def _from_slurm(names: Mapping[str, str]) -> LaunchedRank:
    size = _read(names, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in names else "SLURM_NTASKS")
    nodes = names["SLURM_STEP_NODELIST"]
    is_one = _read(names, "SLURM_STEP_NUM_NODES", default=0) == 1 or not re.search(r"[\[,]", nodes)
    job = f"{names.get('SLURM_JOB_ID', '')}.{names.get('SLURM_STEP_ID', '')}"
    return LaunchedRank(
        launcher="srun",
        rank=_read(names, "SLURM_PROCID"),
        size=size,
        local_rank=_read(names, "SLURM_LOCALID"),
        local_size=size if is_one else _tasks_of_node(names),
        # Not SLURM_LAUNCH_NODE_IPADDR, which is where srun runs: often a login node, without a rank.
        address=names.get("MASTER_ADDR") or (LOOPBACK if is_one else _first_node(nodes)),
        port=_read(names, "MASTER_PORT", default=_derive_port(job)),
    )


def _tasks_of_node(names: Mapping[str, str]) -> int:
    """Return the number of ranks on this node, from a list such as `2(x3),1`: three nodes with 2, one with 1."""
    text = names.get("SLURM_STEP_TASKS_PER_NODE", "")
    matches = [re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part) for part in text.split(",")]
    counts = itertools.chain.from_iterable(
        itertools.repeat(int(each[1]), int(each[2] or 1)) for each in matches if each
    )
    node = _read(names, "SLURM_NODEID")
    count = next(itertools.islice(counts, node, None), None)
    if count is None or None in matches:
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE = {text[:200]!r}: expected the number of ranks of each node, such as 2(x3),1"
        )
    return count


def _first_node(nodes: str) -> str:
    """Return the first of `node[03-05,7],other`: that of rank 0, unless the step has another distribution."""
    match = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\])?([^\[,]*)", nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST = {nodes[:200]!r}: expected names of hosts, such as node[01-04]")
    return "".join(part or "" for part in match.groups())


def _derive_port(job: str) -> int:
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS


def _read(names: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = names.get(name, "")
    if not text and default is not None:
        return default
    if not re.fullmatch("[0-9]{1,9}", text):
        raise ValueError(f"{name} = {text[:40]!r}: expected a whole number, as the launcher of the ranks sets it")
    return int(text)
