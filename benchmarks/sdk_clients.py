"""Run many clients of the SDK in one process, each with its own identity, connection and cache.

python benchmarks/sdk_clients.py TICKET_FILE FOLDER COUNT
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import noop
from fedplat_client import Client


def main(ticket: str, folder: Path, count: int) -> None:
    """Run `count` clients until SIGTERM."""
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


if __name__ == "__main__":
    main(Path(sys.argv[1]).read_text(), Path(sys.argv[2]), int(sys.argv[3]))
