"""A program with several clients that sends its own spans: python traced_clients.py RECEIVER FOLDER NUMBER < tickets.

It prints a line for each client that trains in round 2, and lets them go on when it reads a line; after another line,
or the end of its input, it ends.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from fedplat_client import Client, Task, TrainResult

go_on = threading.Event()


def train(task: Task) -> TrainResult:
    if task.round == 2:
        sys.stdout.write("training\n")
        sys.stdout.flush()
        assert go_on.wait(60.0)
    task.parameters["weight"] += np.float32(1)
    return TrainResult(parameters=task.parameters, num_examples=3)


def main(receiver: str, folder: str, number: int) -> None:
    provider = TracerProvider(resource=Resource.create({"service.name": "hospital"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=receiver)))
    trace.set_tracer_provider(provider)
    ticket = sys.stdin.readline().strip()
    clients = [Client.from_ticket(ticket, data_dir=Path(folder, str(each))) for each in range(number)]
    threads: list[threading.Thread] = []
    for client in clients:
        client.add_trainer("add", train)
        threads.append(threading.Thread(target=client.run))
        threads[-1].start()
    sys.stdin.readline()
    go_on.set()
    sys.stdin.readline()
    for client in clients:
        client.stop()
    for thread in threads:
        thread.join()
    provider.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
