"""Ranks in threads of this process, whose messages follow the rules of PyTorch's NCCL: a deadlock is found on a CPU.

- A batch of messages and a collective use the communicator of the whole group, a single message that of its pair.
- A communicator begins when each of its ranks has used it; until then those that use it wait.
- The operations of a rank on one communicator run one after the other; the messages of a batch run at once.
- A send ends when its receive does: NCCL has a buffer for small messages only, and here there is not even that.

What is in the memory of the host (bytes, integers and float64, as the product uses them) is exchanged by Gloo, which
buffers messages. A rank waits for a message in its program, where with NCCL only its device waits for it. The device
computes in order, so that this changes nothing but the time at which the rank reaches the next message of the host.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
from torch import distributed

from fedplat.pytorch.distributed import Ranks

Result = TypeVar("Result")
ALL = "the group"
HOST_DTYPES = (torch.uint8, torch.int64, torch.float64)


class DeadlockError(Exception):
    """All ranks wait for each other."""


@dataclass(eq=False)
class Operation:
    """A message, or this rank's part of a collective."""

    kind: str
    """`send`, `receive` or `reduce`."""
    tensor: torch.Tensor
    peer: int = -1
    done: bool = False


@dataclass(eq=False)
class Batch:
    """What a rank does at once on a communicator; PyTorch calls it a work."""

    network: Network
    rank: int
    communicator: str
    operations: list[Operation]

    def wait(self, *_: object) -> None:
        """Wait until all is done."""
        kinds = " and ".join(f"{each.kind} {each.peer}" for each in self.operations)
        self.network.block(self.rank, lambda: self.is_done, f"{kinds} on {self.communicator}")

    @property
    def is_done(self) -> bool:
        """Whether all is done."""
        return all(each.done for each in self.operations)


class HostWork:
    """A message that Gloo has buffered."""

    def wait(self, *_: object) -> None:
        """Do nothing."""


@dataclass(eq=False)
class P2POp:
    """One message of a batch, as PyTorch describes it."""

    op: Callable[..., Any]
    tensor: torch.Tensor
    peer: int = -1
    group: object = None
    tag: int = 0
    group_peer: int = -1

    def __post_init__(self) -> None:
        self.peer = self.group_peer = max(self.peer, self.group_peer)


@dataclass(eq=False)
class Network:
    """What connects the ranks; its methods with the names of those of `torch.distributed` stand in their places."""

    count: int
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _place: threading.local = field(default_factory=threading.local)
    _blocked: dict[int, tuple[Callable[[], bool], str]] = field(default_factory=dict)
    _ended: int = 0
    _deadlock: str = ""
    _users: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    _queues: dict[tuple[str, int], deque[Batch]] = field(default_factory=lambda: defaultdict(deque))
    _host: dict[tuple[int, int, int], deque[torch.Tensor]] = field(default_factory=lambda: defaultdict(deque))
    _gathered: dict[int, dict[int, torch.Tensor]] = field(default_factory=lambda: defaultdict(dict))
    _num_gathered: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    @contextmanager
    def as_rank(self, rank: int) -> Generator[Ranks]:
        """Be a rank in this thread."""
        self._place.rank = rank
        yield Ranks(torch.device("cpu"), self)  # type: ignore[arg-type]

    def run(self, program: Callable[[Ranks], Result]) -> list[Result]:
        """Return what a program returns on each rank. Raises `DeadlockError`, or the first error of a rank."""
        results: dict[int, Result] = {}
        errors: list[BaseException] = []

        def begin(rank: int) -> None:
            try:
                with self.as_rank(rank) as ranks:
                    results[rank] = program(ranks)
            except BaseException as exc:
                errors.append(exc)
            with self._changed:
                self._ended += 1
                self._changed.notify_all()

        threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(self.count)]

    def block(self, rank: int, is_ready: Callable[[], bool], what: str) -> None:
        """Wait. Raises `DeadlockError` if no rank can do anything any more."""
        with self._changed:
            self._blocked[rank] = is_ready, what
            while not is_ready():
                stuck = len(self._blocked) + self._ended == self.count
                if stuck and not any(each() for each, _ in self._blocked.values()):
                    self._deadlock = "; ".join(
                        f"rank {one}: {text}" for one, (_, text) in sorted(self._blocked.items())
                    )
                if self._deadlock:
                    self._changed.notify_all()
                    raise DeadlockError(self._deadlock)
                self._changed.wait()
            del self._blocked[rank]

    def get_rank(self, group: object = None) -> int:
        return self._place.rank

    def get_world_size(self, group: object = None) -> int:
        return self.count

    def get_global_rank(self, group: object, rank: int) -> int:
        return rank

    def isend(
        self, tensor: torch.Tensor, dst: int = -1, group: object = None, tag: int = 0, group_dst: int = -1
    ) -> Batch | HostWork:
        peer = max(dst, group_dst)
        if tensor.dtype in HOST_DTYPES:
            with self._changed:
                self._host[self.get_rank(), peer, tag].append(tensor.clone())
                self._changed.notify_all()
            return HostWork()
        return self._begin(self._pair(peer), [Operation("send", tensor, peer)])

    def irecv(
        self, tensor: torch.Tensor, src: int = -1, group: object = None, tag: int = 0, group_src: int = -1
    ) -> Batch | HostWork:
        peer, rank = max(src, group_src), self.get_rank()
        if tensor.dtype in HOST_DTYPES:
            waiting = self._host[peer, rank, tag]
            self.block(rank, lambda: bool(waiting), f"receive {peer} in the host's memory")
            tensor.copy_(waiting.popleft())
            return HostWork()
        return self._begin(self._pair(peer), [Operation("receive", tensor, peer)])

    def send(self, *arguments: Any, **options: Any) -> None:
        self.isend(*arguments, **options).wait()

    def recv(self, *arguments: Any, **options: Any) -> None:
        self.irecv(*arguments, **options).wait()

    def batch_isend_irecv(self, operations: Iterable[P2POp]) -> list[Batch | HostWork]:
        messages = [
            Operation("send" if each.op == distributed.isend else "receive", each.tensor, each.peer)
            for each in operations
        ]
        return [self._begin(ALL, messages)]

    def all_reduce(self, tensor: torch.Tensor, group: object = None) -> None:
        if tensor.dtype in HOST_DTYPES:
            parts = [torch.empty_like(tensor) for _ in range(self.count)]
            self.all_gather(parts, tensor)
            tensor.copy_(torch.stack(parts).sum(0))
            return
        self._begin(ALL, [Operation("reduce", tensor)]).wait()

    def all_gather(self, parts: list[torch.Tensor], tensor: torch.Tensor, group: object = None) -> None:
        assert tensor.dtype in HOST_DTYPES
        rank = self.get_rank()
        with self._changed:
            number = self._num_gathered[rank]
            self._num_gathered[rank] += 1
            found = self._gathered[number]
            found[rank] = tensor.clone()
            self._changed.notify_all()
        self.block(rank, lambda: len(found) == self.count, "gather in the host's memory")
        for place, part in enumerate(parts):
            part.copy_(found[place])

    def _pair(self, peer: int) -> str:
        return "{} and {}".format(*sorted((self.get_rank(), peer)))

    def _begin(self, communicator: str, operations: list[Operation]) -> Batch:
        rank, size = self.get_rank(), self.count if communicator == ALL else 2
        users = self._users[communicator]
        with self._changed:
            users.add(rank)
            self._changed.notify_all()
        self.block(rank, lambda: len(users) == size, f"the first use of {communicator} by all of it")
        batch = Batch(self, rank, communicator, operations)
        with self._changed:
            self._queues[communicator, rank].append(batch)
            while self._advance(communicator):
                pass
            self._changed.notify_all()
        return batch

    def _advance(self, communicator: str) -> bool:
        """Do what the first batches of all ranks on a communicator can do; return whether it was anything."""
        queues = {rank: queue for (name, rank), queue in self._queues.items() if name == communicator and queue}
        heads = {rank: [each for each in queue[0].operations if not each.done] for rank, queue in queues.items()}
        reductions = [each for head in heads.values() for each in head if each.kind == "reduce"]
        if len(reductions) == self.count:
            total = torch.stack([each.tensor for each in reductions]).sum(0)
            for each in reductions:
                each.tensor.copy_(total)
                each.done = True
        for rank, head in heads.items():
            for message in [each for each in head if each.kind == "send"]:
                self._deliver(message, rank, heads.get(message.peer, []))
        ended = [queue for queue in queues.values() if queue[0].is_done]
        for queue in ended:
            queue.popleft()
        return bool(ended)

    @staticmethod
    def _deliver(message: Operation, sender: int, head: Iterable[Operation]) -> None:
        for each in head:
            if each.kind == "receive" and each.peer == sender and not each.done:
                with torch.no_grad():
                    each.tensor.copy_(message.tensor)
                each.done = message.done = True
                return


def make_network(count: int, monkeypatch: pytest.MonkeyPatch) -> Network:
    """Return a network, which replaces functions of `torch.distributed` until the end of the test."""
    made = Network(count)
    names = ("isend", "irecv", "send", "recv", "batch_isend_irecv", "all_reduce", "all_gather")
    for name in (*names, "get_rank", "get_world_size", "get_global_rank"):
        monkeypatch.setattr(distributed, name, getattr(made, name))
    monkeypatch.setattr(distributed, "P2POp", P2POp)
    return made
