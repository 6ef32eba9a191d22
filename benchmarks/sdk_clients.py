"""Run many clients of the SDK in one process, each with its own identity, connection and cache.

python benchmarks/sdk_clients.py TICKET_FILE FOLDER COUNT [MASK_SECONDS]

With `MASK_SECONDS`, clients wait for this time instead of computing the masks that they share with others, as if each
had a processor of its own. Those masks cancel out, so the sum is right if no client drops out.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import noop
from fedplat.secure_aggregation import primitives
from fedplat_client import Client


def main(ticket: str, folder: Path, count: int, mask_s: float = 0.0) -> None:
    """Run `count` clients until SIGTERM."""
    if mask_s:
        wait_instead_of_masking(mask_s)
    clients = [Client.from_ticket(ticket, data_dir=folder / str(number)) for number in range(count)]
    for client in clients:
        client.add_trainer("noop", noop.train)
    threads = [threading.Thread(target=client.run) for client in clients]
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda signum, frame: over.set())
    for thread in threads:
        thread.start()
    over.wait()
    for client in clients:
        client.stop()
    for thread in threads:
        thread.join()


def wait_instead_of_masking(mask_s: float) -> None:
    """Let clients add their own mask only, and wait for `mask_s` seconds."""
    apply = primitives.apply_masks

    def wait(vector: primitives.Vector, modulus: int, added: Sequence[bytes], subtracted: Sequence[bytes]) -> None:
        apply(vector, modulus, added[:1], ())  # the first is the client's own
        time.sleep(mask_s)

    primitives.apply_masks = wait


if __name__ == "__main__":
    main(Path(sys.argv[1]).read_text(), Path(sys.argv[2]), int(sys.argv[3]), *map(float, sys.argv[4:]))
