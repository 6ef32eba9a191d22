"""The costs of secure aggregation that a simulation reports, compared with the protocol that it carries out.

    python benchmarks/secure_costs.py
    python benchmarks/secure_costs.py --quick

Each row is one aggregation in one process, of updates of random numbers. "model" is the formula of
`fedplat.simulation.secure.groups`, "measured" the processor time of the same steps. Signatures of a roster are verified
once in a process, and once by each client in reality: the measured column adds them for the other clients. The two
agree within a factor of 1.7 on the machine whose unit costs the model has.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Annotated, TypeVar

import numpy as np
import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import report
from fedplat.secure_aggregation import encoding, unmasking
from fedplat.secure_aggregation.messages import (
    KeyAdvertisement,
    Member,
    SealedShares,
    SecureAggregation,
    Survivors,
    UnmaskAnswer,
)
from fedplat.secure_aggregation.participant import Participant, ParticipantLimits
from fedplat.secure_aggregation.setup import Encoding, Graph, Setup
from fedplat.simulation.secure import groups

CASES = ((20, 100_000, 1), (100, 100_000, 5), (150, 100_000, 7), (100, 1_000_000, 5))
QUICK = ((10, 1_000, 1),)
_Result = TypeVar("_Result")


@dataclasses.dataclass
class Clock:
    """Adds up processor time."""

    total_s: float = 0.0

    def time(self, call: Callable[[], _Result]) -> _Result:
        """Return the result of a call."""
        begin = time.process_time()
        result = call()
        self.total_s += time.process_time() - begin
        return result


def run(num_clients: int, size: int, num_dropped: int) -> tuple[report.Cell, ...]:
    """Carry out one aggregation, and return its row."""
    options = SecureAggregation()
    described = Encoding(size=size, clip=1.0, bits=20, modulus=32, max_examples=0.0, max_clients=num_clients)
    setup = Setup("bench", 1, 1, "digest", "task", options, described, 3)
    keys = [Ed25519PrivateKey.generate() for _ in range(num_clients)]
    clients, server = Clock(), Clock()
    public = [key.public_key().public_bytes_raw() for key in keys]
    people = [Participant(setup, public[i], key.sign, ParticipantLimits()) for i, key in enumerate(keys)]
    sent_keys = [KeyAdvertisement.from_bytes(clients.time(each.advertise)) for each in people]
    for index, each in enumerate(sent_keys):
        server.time(lambda index=index, each=each: unmasking.check_keys(setup, public[index], each))
    members = [Member(str(index), public[index], each) for index, each in enumerate(sent_keys)]
    graph = Graph.of(options, num_clients)
    rosters = [unmasking.make_roster(members, index) for index in range(num_clients)]
    sent = {
        index: SealedShares.from_bytes(clients.time(lambda index=index: people[index].share(rosters[index])))
        for index in range(num_clients)
    }
    survivors = Survivors((*range(num_clients - num_dropped),), (*range(num_clients - num_dropped, num_clients),))
    total = np.zeros(described.length, np.uint32)
    update = np.random.default_rng(0).normal(size=size).astype(np.float32)
    for index in range(num_clients):
        held = unmasking.route_shares(graph, index, sent)
        vector = clients.time(lambda: encoding.encode(described, update, 1.0, {}, os.urandom))
        clients.time(lambda index=index, held=held, vector=vector: people[index].mask(held, vector))
        if index in survivors.survivors:
            server.time(lambda vector=vector: np.add(total, vector, out=total))
    request = unmasking.make_request(survivors, {})
    answers = {
        index: UnmaskAnswer.from_bytes(clients.time(lambda index=index: people[index].answer(request)))
        for index in survivors.survivors
    }
    server.time(lambda: unmasking.remove_masks(setup, members, sent, survivors, answers, total))
    client_s = clients.total_s / num_clients + groups.UNITS.verify_s * (num_clients - 1)
    found = groups.GroupCosts(setup, graph, [each.client_id for each in members])
    senders = frozenset(sent)
    steps = (
        groups.advertising_cost(setup),
        found.share(0),
        found.mask(0, senders),
        found.answer(0, survivors, frozenset()),
    )
    modelled_s = sum(step.cpu_s for step in steps)
    server_s = found.server_s(survivors)
    times = (modelled_s, client_s, modelled_s / client_s, server_s, server.total_s, server_s / server.total_s)
    shown = tuple(f"{each:.3g}" for each in times)
    return f"{num_clients}", f"{graph.degree}", f"{size:,}", f"{num_dropped}", *shown


def main(
    quick: Annotated[bool, typer.Option("--quick", help="A small case only.")] = False,
    as_json: report.JsonOption = False,
) -> None:
    """Compare the simulation's formula for the costs of secure aggregation with measurements."""
    rows = tuple(run(*case) for case in (QUICK if quick else CASES))
    columns = ("clients", "neighbours", "entries", "drop-outs", "client model s", "client measured s", "ratio")
    table = report.Report(
        name="secure_costs",
        title="Seconds of a core for one secure aggregation",
        columns=(*columns, "server model s", "server measured s", "server ratio"),
        rows=rows,
        command="python benchmarks/secure_costs.py",
    )
    report.finish(table, as_json, save=False)


if __name__ == "__main__":
    typer.run(main)
