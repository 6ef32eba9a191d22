"""The group of ranks: who belongs to it, on which device each computes, and small messages between them."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

Backend: TypeAlias = Literal["auto", "gloo", "nccl"]
"""What carries tensors: Gloo on CPUs, NCCL on GPUs, or whichever fits the machine."""

COLLECTIVE_S = 600.0
"""How long a rank waits for the others within one operation."""
PROOF_S = 120.0
"""How long a rank waits for the proof that another one is a rank."""
_PROOF_BYTES = 32


class Ranks:
    """The ranks that work together; this process is number `rank` of `size`, and computes on `device`.

    All of them have to call each method in the same order. One that dies ends the others' calls with `RuntimeError`.
    """

    def __init__(
        self,
        device: torch.device,
        group: distributed.ProcessGroup | None = None,
        timeout_s: float = COLLECTIVE_S,
        key: bytes = b"",
    ) -> None:
        """Within `joined`. Without a `group`: all ranks."""
        self._key = key
        self.device = device
        self.group = group
        self.timeout_s = timeout_s
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)
        self._smaller: dict[int, Ranks | None] = {}
        self._on_cpu: Ranks | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that speaks for all."""
        return self.rank == 0

    def gather(self, content: bytes) -> list[bytes]:
        """What every rank gave, in the order of ranks; all of them get it. For small things."""
        length = torch.tensor([len(content)])
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        distributed.all_gather(lengths, length, group=self.group)
        longest = max(1, *(int(each.item()) for each in lengths))
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else mine[:0]
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        distributed.all_gather(gathered, mine, group=self.group)
        return [each[: int(size.item())].numpy().tobytes() for each, size in zip(gathered, lengths, strict=True)]

    def bring(self, part: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Large parts of all ranks, in the order of ranks, on the first one; nothing on the others."""
        lengths = [int.from_bytes(each, "little") for each in self.gather(part.size.to_bytes(8, "little"))]
        if not self.is_first:
            if part.size:
                distributed.send(torch.from_numpy(part), group=self.group, group_dst=0)
            return []
        parts = [part, *(np.empty(length, part.dtype) for length in lengths[1:])]
        for rank, other in enumerate(parts):
            if rank and other.size:
                distributed.recv(torch.from_numpy(other), group=self.group, group_src=rank)
        return parts

    def told(self, content: bytes = b"") -> bytes:
        """What rank 0 gave; all of them get it."""
        length = torch.tensor([len(content)])
        distributed.broadcast(length, 0, group=self.group)
        told = torch.empty(int(length.item()), dtype=torch.uint8)
        if self.is_first and content:
            told = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if told.numel():
            distributed.broadcast(told, 0, group=self.group)
        return told.numpy().tobytes()

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        here = torch.zeros(1, dtype=torch.uint8)
        distributed.all_gather([torch.empty_like(here) for _ in range(self.size)], here, group=self.group)

    def on(self, backend: Backend) -> Ranks:
        """These ranks, which with "gloo" compute on CPUs even where they have GPUs."""
        if backend != "gloo" or self.device.type == "cpu":
            return self
        if self._on_cpu is None:
            self._on_cpu = Ranks(torch.device("cpu"), self.group, self.timeout_s)
        return self._on_cpu

    def first(self, count: int) -> Ranks | None:
        """The first `count` ranks as a group of their own; None in a process that is none of them.

        All ranks have to call it, of which there are all of `joined`. Raises `ValueError` for fewer than one, and for
        a part of a part.
        """
        if count < 1:
            raise ValueError(f"the first {count} ranks: expected 1 or more")
        if count >= self.size:
            return self
        if self.group is not None:
            raise ValueError("a part of the ranks has no parts of its own; expected all ranks")
        if count not in self._smaller:
            timeout = datetime.timedelta(seconds=self.timeout_s)  # else it is PyTorch's own
            group: Any = distributed.new_group(list(range(count)), timeout=timeout)
            smaller = Ranks(self.device, group, self.timeout_s) if self.rank < count else None
            if smaller is not None and self._key:
                prove(smaller, self._key)
            self._smaller[count] = smaller
        return self._smaller[count]


@contextmanager
def joined(
    backend: Backend = "auto",
    timeout_s: float = COLLECTIVE_S,
    store: distributed.Store | None = None,  # pyright: ignore[reportPrivateImportUsage]
    key: bytes = b"",
) -> Generator[Ranks]:
    """The ranks that torchrun started with this process, or this process alone, for as long as the context lasts.

    "auto" is NCCL where there is a GPU for each rank of this host. If all ranks are on one host, and GLOO_SOCKET_IFNAME
    is its loopback, no other host reaches what they tell each other. Processes that join several times, one after the
    other, need a `store` of their own for each time. With a `key`, which all of them have to have, each proves to the
    others that it is a rank. Raises `ValueError` for "nccl" where there is none, and `PermissionError` for a stranger.
    """
    gpus = 0 if backend == "gloo" else torch.cuda.device_count()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if backend == "nccl" and gpus < local:
        raise ValueError(f'backend = "nccl": expected a GPU for each of {local} ranks, found {gpus}; there is "gloo"')
    on_gpu = gpus >= local
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    options: dict[str, Any] = {"timeout": datetime.timedelta(seconds=timeout_s)}
    if "RANK" not in os.environ:
        store = distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        options |= {"store": store, "rank": 0, "world_size": 1}
    elif store is not None:
        options |= {"store": store, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    # Gloo as well on GPUs: small messages are in the memory of the host.
    distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", **options)
    try:
        ranks = Ranks(device, timeout_s=timeout_s, key=key)
        if key:
            prove(ranks, key)
        yield ranks
    finally:
        distributed.destroy_process_group()


def store_of_one_host(folder: Path) -> distributed.Store:  # pyright: ignore[reportPrivateImportUsage]
    """Return where ranks of one host meet: a file for each group in a folder that only their user opens.

    PyTorch's own store listens on every network of the host, and on its loopback for every user: there one may read
    all that is in it, and put other addresses in place of the ranks'.
    """
    path = folder / f"group-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return distributed.FileStore(str(path), int(os.environ["WORLD_SIZE"]))  # pyright: ignore[reportPrivateImportUsage]


def prove(ranks: Ranks, key: bytes) -> None:
    """Have each pair of ranks prove that both have the key.

    Gloo listens on a port that every user of the host can reach, and takes whatever connects first with a rank's
    number for that rank. A stranger in its place cannot answer, nor ask it: the rank itself connects elsewhere.
    Raises `PermissionError`.
    """
    mine = secrets.token_bytes(_PROOF_BYTES)
    # With several network interfaces there is a connection for each.
    for tag in range(os.environ.get("GLOO_SOCKET_IFNAME", "").count(",") + 1):
        theirs = _swapped(ranks, dict.fromkeys(_others(ranks), mine), tag)
        proofs = {peer: _proof(key, (ranks.rank, peer), (mine, theirs[peer])) for peer in theirs}
        for peer, proof in _swapped(ranks, proofs, tag).items():
            if not hmac.compare_digest(proof, _proof(key, (peer, ranks.rank), (theirs[peer], mine))):
                raise PermissionError(f"what connected as rank {peer} does not have the ranks' key")


def _others(ranks: Ranks) -> list[int]:
    return [rank for rank in range(ranks.size) if rank != ranks.rank]


def _proof(key: bytes, places: tuple[int, int], nonces: tuple[bytes, bytes]) -> bytes:
    return hmac.digest(key, b"fedplat rank %d to %d\0" % places + b"".join(nonces), hashlib.sha256)


def _swapped(ranks: Ranks, contents: dict[int, bytes], tag: int) -> dict[int, bytes]:
    """What every other rank has for this one, for what this one has for it: `_PROOF_BYTES` each."""
    group: Any = ranks.group
    sent = {peer: torch.frombuffer(bytearray(content), dtype=torch.uint8) for peer, content in contents.items()}
    received = {peer: torch.empty(_PROOF_BYTES, dtype=torch.uint8) for peer in contents}
    works = [distributed.isend(content, group=group, group_dst=peer, tag=tag) for peer, content in sent.items()]
    works += [distributed.irecv(content, group=group, group_src=peer, tag=tag) for peer, content in received.items()]
    for work in works:
        assert work is not None
        work.wait(datetime.timedelta(seconds=PROOF_S))
    return {peer: content.numpy().tobytes() for peer, content in received.items()}
