"""Some clients of the soak test, as threads of one process; see `soak.py`.

    python tests/faults/soak_fleet.py --ticket-file FILE --folder FOLDER --first 0 --count 10 --fault-rate 0.1 --seed 1

Each client is a whole `fedplat_client.Client`. With the probability `--fault-rate` a training takes longer than the
deadline allows, fails, or its report is sent twice. The process that starts this one may kill it at any time.
"""

from __future__ import annotations

import random
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from fedplat.wire.v1 import fleet_pb2
from fedplat_client import Client, ClientOptions, Task, TrainResult
from fedplat_client._auth.authenticator import Connection
from fedplat_client.cancellation import StopSignal

POPULATION = "soak"
TRAINER = "soak"
SLOW_S = 8.0


def main(
    ticket_file: Annotated[Path, typer.Option()],
    folder: Annotated[Path, typer.Option()],
    first: Annotated[int, typer.Option()],
    count: Annotated[int, typer.Option()],
    fault_rate: Annotated[float, typer.Option()],
    seed: Annotated[int, typer.Option()],
) -> None:
    """Run clients until SIGTERM."""
    send_twice_sometimes(random.Random(seed), fault_rate)
    clients = [make(ticket_file.read_text(), folder, number, fault_rate) for number in range(first, first + count)]
    threads = [threading.Thread(target=client.run) for client in clients]
    for thread in threads:
        thread.start()
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    for client in clients:
        client.stop()
    for thread in threads:
        thread.join()


def make(ticket: str, folder: Path, number: int, fault_rate: float) -> Client:
    """A client that trains by adding its number to each weight."""
    dice = random.Random()
    options = ClientOptions(
        first_backoff_s=0.2,
        max_backoff_s=3.0,
        check_in_wait_s=20.0,
        inline_limit_bytes=0 if number % 2 else ClientOptions().inline_limit_bytes,  # half of them upload as a stream
    )
    client = Client.from_ticket(ticket, data_dir=folder / str(number), options=options)

    @client.trainer(TRAINER)
    def train(task: Task) -> TrainResult:
        if dice.random() < fault_rate:
            if dice.random() < 0.3:
                raise RuntimeError("this training fails on purpose")
            task.control.wait(dice.uniform(0.0, SLOW_S))
        weight = task.parameters["weight"]
        weight += number
        return TrainResult(parameters=task.parameters, num_examples=1 + number % 7, metrics={"number": float(number)})

    return client


def send_twice_sometimes(dice: random.Random, rate: float) -> None:
    """Makes clients repeat reports that were answered already, as after a lost reply."""
    report = Connection.report

    def report_again(
        self: Connection, request: fleet_pb2.ReportRequest, signal: StopSignal
    ) -> fleet_pb2.ReportResponse:
        response = report(self, request, signal)
        if dice.random() >= rate:
            return response
        request.ClearField("check_in")  # as the client does when it repeats one
        again = report(self, request, signal)
        if response.HasField("receipt") and again.receipt != response.receipt:
            raise AssertionError(f"the second report was answered {again}, the first one {response}")
        return response

    Connection.report = report_again


if __name__ == "__main__":
    # Blocked in all threads, so that sigwait gets them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    typer.run(main)
