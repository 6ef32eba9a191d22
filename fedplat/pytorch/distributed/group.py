"""The group of ranks: its members, the device of each, small messages, and long work for which others wait."""

from __future__ import annotations

import datetime
import functools
import gc
import hashlib
import hmac
import logging
import os
import secrets
import sys
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

from fedplat import errors, texts
from fedplat.pytorch.distributed import launchers

Backend: TypeAlias = Literal["auto", "gloo", "nccl", "mpi"]
"""The library that carries tensors: Gloo on CPUs, NCCL on GPUs, the one of both that fits the machine, or MPI, if
PyTorch was built with it."""

COLLECTIVE_S = 600.0
"""The timeout of one collective."""
PROOF_S = 120.0
"""The timeout of the proof that another process is a rank."""
_PROOF_BYTES = 32
_Cache = functools._lru_cache_wrapper  # pyright: ignore[reportPrivateUsage]


class Ranks:
    """A group of ranks, of which this process is number `rank` of `size`, and computes on `device`.

    All ranks have to call the methods in the same order. If one dies, the calls of the others raise `RuntimeError`.
    """

    def __init__(
        self,
        device: torch.device,
        group: distributed.ProcessGroup | None = None,
        timeout_s: float = COLLECTIVE_S,
        key: bytes = b"",
    ) -> None:
        """Construct a group; use `join_group` to form one. Without a `group`: all ranks."""
        self._key = key
        self.device = device
        self.group = group
        self.timeout_s = timeout_s
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)
        self.kept: dict[object, Any] = {}
        """What is made once for these ranks, by any key; it is freed with them, although it may refer to them."""
        self._subgroups: dict[int, Ranks | None] = {}
        self._on_cpu: Ranks | None = None

    @property
    def is_first(self) -> bool:
        """True if this is rank 0, which acts for the group."""
        return self.rank == 0

    def all_gather(self, content: bytes) -> list[bytes]:
        """Return the contents of all ranks, in their order, on every rank. For small contents."""
        length = torch.tensor([len(content)])
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        distributed.all_gather(lengths, length, group=self.group)
        longest = max(1, *(int(each.item()) for each in lengths))
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else mine[:0]
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        distributed.all_gather(parts, mine, group=self.group)
        return [each[: int(size.item())].numpy().tobytes() for each, size in zip(parts, lengths, strict=True)]

    def gather_arrays(self, part: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return the (large) arrays of all ranks, in their order, on rank 0; an empty list on the others."""
        lengths = [int.from_bytes(each, "little") for each in self.all_gather(part.size.to_bytes(8, "little"))]
        if not self.is_first:
            if part.size:
                distributed.send(torch.from_numpy(part), group=self.group, group_dst=0)
            return []
        parts = [part, *(np.empty(length, part.dtype) for length in lengths[1:])]
        for rank, other in enumerate(parts):
            if rank and other.size:
                distributed.recv(torch.from_numpy(other), group=self.group, group_src=rank)
        return parts

    def broadcast(self, content: bytes = b"") -> bytes:
        """Return the content of rank 0 on every rank."""
        length = torch.tensor([len(content)])
        distributed.broadcast(length, 0, group=self.group)
        values = torch.empty(int(length.item()), dtype=torch.uint8)
        if self.is_first and content:
            values = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if values.numel():
            distributed.broadcast(values, 0, group=self.group)
        return values.numpy().tobytes()

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        token = torch.zeros(1, dtype=torch.uint8)
        distributed.all_gather([torch.empty_like(token) for _ in range(self.size)], token, group=self.group)

    def connect(self) -> None:
        """Connect the devices of all ranks, so that some of them can exchange batches of messages.

        NCCL connects the ranks of a group when all of them do something together for the first time. If that is a batch
        of messages between some of them (`batch_isend_irecv`), they wait for the others, which may wait for them.
        """
        distributed.all_reduce(torch.zeros(1, device=self.device), group=self.group)

    def with_backend(self, backend: Backend) -> Ranks:
        """Return the same ranks, which with "gloo" compute on CPUs even if they have GPUs."""
        if backend != "gloo" or self.device.type == "cpu":
            return self
        if self._on_cpu is None:
            self._on_cpu = Ranks(torch.device("cpu"), self.group, self.timeout_s)
        return self._on_cpu

    def subgroup(self, count: int) -> Ranks | None:
        """Return the first `count` ranks as a separate group; None in a process that is not among them.

        All ranks of `join_group` have to call it. Raises `ValueError` for a count below 1, and on a subgroup.
        """
        if count < 1:
            raise ValueError(f"a subgroup of {count} ranks: expected 1 or more")
        if count >= self.size:
            return self
        if self.group is not None:
            raise ValueError("a subgroup cannot be divided again; expected all ranks")
        if count not in self._subgroups:
            timeout = datetime.timedelta(seconds=self.timeout_s)  # not inherited
            group: Any = distributed.new_group(list(range(count)), timeout=timeout)
            subgroup = Ranks(self.device, group, self.timeout_s, self._key) if self.rank < count else None
            if subgroup is not None:
                self.prove(group)
            self._subgroups[count] = subgroup
        return self._subgroups[count]

    def free(self) -> None:
        """Drop what was made for these ranks, and their subgroups."""
        self.kept.clear()
        self._subgroups.clear()

    def prove(self, group: distributed.ProcessGroup) -> None:
        """Have the ranks of a new group of processes prove their key to each other, if these ranks have one."""
        if self._key:
            prove_key(Ranks(self.device, group, self.timeout_s), self._key)


def _clear_mesh_caches() -> None:
    """Clear the caches of DTensor, which keep a mesh, and so its groups, as long as the process runs."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute, debug  # pyright: ignore[reportPrivateUsage]

    names = (debug, "_clear_sharding_prop_cache"), (_redistribute, "clear_redistribute_planner_cache")
    for module, name in names:
        if (clear := getattr(module, name, None)) is not None:  # not in every PyTorch since 2.9
            clear()
    for each in gc.get_objects():
        # `isinstance` would ask each object for its class, for which a deprecated one of PyTorch warns.
        if type(each) is _Cache and each.__module__.startswith("torch.distributed.tensor."):
            each.cache_clear()


@contextmanager
def join_group(
    backend: Backend = "auto",
    timeout_s: float = COLLECTIVE_S,
    store: distributed.Store | None = None,  # pyright: ignore[reportPrivateImportUsage]
    key: bytes = b"",
) -> Generator[Ranks]:
    """Form a group with the ranks that a launcher started together with this one, or alone; yield it, then leave it.

    "auto" is NCCL if there is a GPU for each rank of this host. If all ranks are on one host, and GLOO_SOCKET_IFNAME is
    its loopback, no other host can reach them; under mpirun and srun that is the default. A process that joins several
    times, one after the other, needs a new `store` each time. With a shared `key`, each rank proves to the others that
    it has the key. Raises `ValueError` for a library that cannot be used, and `PermissionError` if another process has
    connected in place of a rank.
    """
    place = launchers.find_rank()
    gpus = 0 if backend in ("gloo", "mpi") else torch.cuda.device_count()
    local = 1 if place is None else place.local_size
    check_mpi(backend)
    if backend == "nccl" and gpus < local:
        raise ValueError(f'backend = "nccl": expected a GPU for each of {local} ranks, found {gpus}; use "gloo"')
    on_gpu = gpus >= local
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", 0 if place is None else place.local_rank)
        torch.cuda.set_device(device)
    options: dict[str, Any] = {"timeout": datetime.timedelta(seconds=timeout_s)}
    if backend != "mpi":  # MPI numbers the ranks itself
        options |= _meet(place, store, timeout_s)
    # Gloo is also needed with GPUs, for small messages in the host's memory.
    libraries = "mpi" if backend == "mpi" else "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    distributed.init_process_group(libraries, **options)
    ranks = Ranks(device, timeout_s=timeout_s, key=key)
    try:
        if key:
            prove_key(ranks, key)
        yield ranks
    except BaseException as exc:
        # The other ranks notice only when the connections close: when nothing refers to the group any more. What failed
        # in the block, such as a DistributedDataParallel, refers to it from the frames of the traceback, and in cycles.
        traceback.clear_frames(exc.__traceback__)
        ranks.free()
        _clear_mesh_caches()
        distributed.destroy_process_group()
        gc.collect()
        raise
    distributed.destroy_process_group()


def check_mpi(backend: Backend) -> None:
    """Raise `ValueError` for "mpi" with a PyTorch that was built without it."""
    if backend == "mpi" and not distributed.is_mpi_available():
        raise ValueError(
            'backend = "mpi": this PyTorch was built without MPI; use "auto", which also works under mpirun, or build '
            "PyTorch from source where an MPI library is installed"
        )


def _meet(place: launchers.LaunchedRank | None, store: Any, timeout_s: float) -> dict[str, Any]:
    """Return how this rank meets the others: the arguments of `init_process_group`."""
    if place is None:
        return {"store": distributed.HashStore(), "rank": 0, "world_size": 1}  # pyright: ignore[reportPrivateImportUsage]
    if place.launcher != "torchrun":
        if place.is_on_one_host:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if store is None:
            store = launchers.open_store(place, timeout_s)
    return {} if store is None else {"store": store, "rank": place.rank, "world_size": place.size}


def make_file_store(folder: Path) -> distributed.Store:  # pyright: ignore[reportPrivateImportUsage]
    """Return a store for ranks of one host: a file for each group, in a folder that only their user may open.

    PyTorch's default store listens on every network of the host: every user can read all of it there, and replace the
    addresses of the ranks.
    """
    path = folder / f"group-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    place = launchers.find_rank()
    size = 1 if place is None else place.size
    return distributed.FileStore(str(path), size)  # pyright: ignore[reportPrivateImportUsage]


def prove_key(ranks: Ranks, key: bytes) -> None:
    """Have each pair of ranks prove to each other that both have the key.

    Gloo listens on a port that every user of the host can reach, and treats the first connection that names a rank as
    that rank. Another process in its place cannot answer, nor can it have the real rank answer for it, which is
    connected to other processes. Raises `PermissionError`.
    """
    mine = secrets.token_bytes(_PROOF_BYTES)
    # With several network interfaces there is a connection for each.
    for tag in range(os.environ.get("GLOO_SOCKET_IFNAME", "").count(",") + 1):
        theirs = _exchange(ranks, dict.fromkeys([rank for rank in range(ranks.size) if rank != ranks.rank], mine), tag)
        proofs = {peer: _proof(key, (ranks.rank, peer), (mine, theirs[peer])) for peer in theirs}
        for peer, proof in _exchange(ranks, proofs, tag).items():
            if not hmac.compare_digest(proof, _proof(key, (peer, ranks.rank), (theirs[peer], mine))):
                raise PermissionError(f"the process connected as rank {peer} does not have the ranks' key")


def _proof(key: bytes, places: tuple[int, int], nonces: tuple[bytes, bytes]) -> bytes:
    return hmac.digest(key, b"fedplat rank %d to %d\0" % places + b"".join(nonces), hashlib.sha256)


def _exchange(ranks: Ranks, contents: dict[int, bytes], tag: int) -> dict[int, bytes]:
    """Send each other rank its content, and return what each has sent: `_PROOF_BYTES` each."""
    group: Any = ranks.group
    sent = {peer: torch.frombuffer(bytearray(content), dtype=torch.uint8) for peer, content in contents.items()}
    received = {peer: torch.empty(_PROOF_BYTES, dtype=torch.uint8) for peer in contents}
    works = [distributed.isend(content, group=group, group_dst=peer, tag=tag) for peer, content in sent.items()]
    works += [distributed.irecv(content, group=group, group_src=peer, tag=tag) for peer, content in received.items()]
    for work in works:
        assert work is not None
        work.wait(datetime.timedelta(seconds=PROOF_S))
    return {peer: content.numpy().tobytes() for peer, content in received.items()}


STEP_BYTES = 64 << 20
"""About how many bytes a step reads or writes: even a slow disk needs much less time than a collective may take."""
_logger = logging.getLogger(__name__)


def work_in_steps(ranks: Ranks, steps: Iterator[object], what: str) -> None:
    """Do work that may take longer than a collective in steps, after each of which all ranks meet.

    All ranks call it, with the same number of steps; those that wait for others have empty ones. If a step raises
    `OSError` on any rank, all ranks raise `TrainingError`; `what` names the result in errors.
    """
    is_done = False
    while not is_done:
        text = ""
        try:
            is_done = next(steps, ranks) is ranks
        except OSError as exc:
            _logger.exception("On this rank %s cannot be used.", what)
            text = texts.describe(exc)
        for rank, error in enumerate(ranks.all_gather(text.encode())):
            if error:
                raise errors.TrainingError(f"{what} cannot be used on rank {rank}: {error.decode()}")
