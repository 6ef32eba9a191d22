"""A slow line between two network namespaces: packets are limited to a rate, delayed and, at random, lost.

    python benchmarks/link.py NEAR_PID FAR_PID CONGESTION MBIT_PER_S RTT_MS LOSS_PERCENT SEED

Each end is a TUN interface in the network namespace of a process, with the addresses `NEAR` and `FAR`. Between them,
this program forwards IP packets: TCP is that of the kernel, with its congestion control, and sees a line as Linux's
netem would make it, which kernels without that module do not have. A queue drops what comes faster than the line, like
a router's, when it has `QUEUE_S` of data. Prints "ready", and runs until it is terminated. Needs root.
"""

from __future__ import annotations

import collections
import fcntl
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field

NEAR, FAR = "10.213.7.1", "10.213.7.2"
MTU = 1500
QUEUE_S = 0.1
"""What the line's queue holds, in seconds: twice the round trip of the lines that are measured."""
TICK_S = 0.0005
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000


@dataclass
class Direction:
    """Packets on their way from one end to the other."""

    source: int
    target: int
    bytes_per_s: float
    delay_s: float
    loss: float
    rng: random.Random
    free_at: float = 0.0
    """When the last packet has left the sender's interface."""
    flying: collections.deque[tuple[float, bytes]] = field(default_factory=collections.deque[tuple[float, bytes]])
    """Packets with the time of their arrival, in order."""

    def take(self, now: float) -> None:
        """Take all packets of the sender."""
        while True:
            try:
                packet = os.read(self.source, 65_536)
            except BlockingIOError:
                return
            self.free_at = max(self.free_at, now)
            if self.free_at - now > QUEUE_S or self.rng.random() < self.loss:
                continue
            self.free_at += len(packet) / self.bytes_per_s
            self.flying.append((self.free_at + self.delay_s, packet))

    def deliver(self, now: float) -> None:
        """Give the receiver the packets that have arrived."""
        flying = self.flying
        while flying and flying[0][0] <= now:
            os.write(self.target, flying.popleft()[1])


def open_end(name: str, pid: int, address: str, peer: str, congestion: str) -> int:
    """Create an interface in the network namespace of a process; return its descriptor, which does not block.

    `congestion` is TCP's congestion control on it, such as cubic or bbr.
    """
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    subprocess.run(["ip", "link", "set", name, "netns", str(pid)], check=True)
    inside = ["nsenter", "--net", "--target", str(pid), "ip"]
    for command in (
        ["link", "set", "lo", "up"],
        ["address", "add", address, "peer", peer, "dev", name],
        ["link", "set", name, "mtu", str(MTU), "txqueuelen", "10000", "up"],
        ["route", "replace", peer, "dev", name, "congctl", congestion],
    ):
        subprocess.run([*inside, *command], check=True)
    return descriptor


def forward(directions: list[Direction]) -> None:
    """Forward packets until the process ends."""
    selector = selectors.DefaultSelector()
    for direction in directions:
        selector.register(direction.source, selectors.EVENT_READ, direction)
    while True:
        is_idle = not any(direction.flying for direction in directions)
        for key, _ in selector.select(None if is_idle else TICK_S):
            key.data.take(time.monotonic())
        now = time.monotonic()
        for direction in directions:
            direction.deliver(now)


def main(near_pid: str, far_pid: str, congestion: str, *line: str) -> None:
    """Run a line between the namespaces of two processes."""
    mbit_per_s, rtt_ms, loss_percent, seed = map(float, line)
    near = open_end(f"near{os.getpid()}", int(near_pid), NEAR, FAR, congestion)
    far = open_end(f"far{os.getpid()}", int(far_pid), FAR, NEAR, congestion)
    of_line = mbit_per_s * 1e6 / 8, rtt_ms / 2e3, loss_percent / 100.0, random.Random(int(seed))
    os.nice(-20)  # a line does not wait for the processes that it connects
    print("ready", flush=True)
    forward([Direction(near, far, *of_line), Direction(far, near, *of_line)])


if __name__ == "__main__":
    main(*sys.argv[1:])
