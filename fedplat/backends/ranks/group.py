"""The group of ranks: who belongs to it, on which device each computes, and small messages between them."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

Backend: TypeAlias = Literal["auto", "gloo", "nccl"]
"""What carries tensors: Gloo on CPUs, NCCL on GPUs, or whichever fits the machine."""

COLLECTIVE_S = 600.0
"""How long a rank waits for the others within one operation."""


class Ranks:
    """The ranks that work together; this process is number `rank` of `size`, and computes on `device`.

    All of them have to call each method in the same order. One that dies ends the others' calls with `RuntimeError`.
    """

    def __init__(
        self, device: torch.device, group: distributed.ProcessGroup | None = None, timeout_s: float = COLLECTIVE_S
    ) -> None:
        """Within `joined`. Without a `group`: all ranks."""
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
            self._smaller[count] = Ranks(self.device, group, self.timeout_s) if self.rank < count else None
        return self._smaller[count]


@contextmanager
def joined(
    backend: Backend = "auto",
    timeout_s: float = COLLECTIVE_S,
    store: distributed.Store | None = None,  # pyright: ignore[reportPrivateImportUsage]
) -> Generator[Ranks]:
    """The ranks that torchrun started with this process, or this process alone, for as long as the context lasts.

    "auto" is NCCL where there is a GPU for each rank of this host. If all ranks are on one host, and GLOO_SOCKET_IFNAME
    is its loopback, no other host reaches what they tell each other. Processes that join several times, one after the
    other, need a `store` of their own for each time. Raises `ValueError` for "nccl" where there is none.
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
    elif (store := store or _loopback_store()) is not None:
        options |= {"store": store, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    # Gloo as well on GPUs: small messages are in the memory of the host.
    distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", **options)
    try:
        yield Ranks(device, timeout_s=timeout_s)
    finally:
        distributed.destroy_process_group()


def _loopback_store() -> Any:
    """The key-value store of the ranks of one host; None of several, and where torchrun has made one already.

    PyTorch's own would listen on every network of the host, for whoever comes.
    """
    if os.environ.get("GROUP_WORLD_SIZE") != "1" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    port = int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] != "0":
        return distributed.TCPStore("127.0.0.1", port, is_master=False)  # pyright: ignore[reportPrivateImportUsage]
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        return distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
