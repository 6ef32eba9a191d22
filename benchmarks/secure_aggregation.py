"""Measure secure aggregation: a client, the server and their messages, and whole rounds with and without masks.

    python benchmarks/secure_aggregation.py [--rounds 2] [--json] [--save]

The work is that of one attempt on a model of `--parameters` entries: one client from its keys to its answer, and the
server from the answers to the sum without masks, with 5 % of the clients lost after they sent their shares. Flower does
the same with its SecAgg+, in the environment of the other platforms, if it exists. The limit is the key stream of the
same masks (AES-256 in counter mode), and one pass over memory for each. Flower's clients share masks with all that
hold their shares. The sum is compared with that of the vectors if
the group has at most `MAX_CHECKED` clients; in larger ones only the vector of the measured client is masked, because no
time of the server depends on the others.

Whole rounds are those of a real server and of SDK clients, many in a process, with `--clients` clients and no
drop-outs. The clients share the machine, so the round takes the time of all their masks, too. A second run has clients
that wait for as long as their masks take, as if each had a processor of its own.
The JSON object has the key `rounds`, its second table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import report
import secure_rounds
from fedplat.secure_aggregation import primitives, unmasking
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

PEERS = Path(__file__).resolve().parents[1] / ".venv-peers" / "bin" / "python"
THEIRS = Path(__file__).with_name("peers") / "flower_secagg.py"
MAX_CHECKED = 100
MAX_PEER = 100
"""Maximum size of a group for which Flower is measured: with 1,000 clients its server would take an hour or more."""
BYTES_PER_ENTRY = 4
COLUMNS = ("clients", "work", "fedplat", "Flower SecAgg+", "Flower / fedplat", "limit", "fedplat / limit")
Vector = npt.NDArray[np.uint32]


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements of a group of clients."""

    graph: Graph
    client_s: float
    server_s: float
    server_cores_s: float
    sent_bytes: int
    received_bytes: int
    num_removed: int


def main(
    parameters: Annotated[int, typer.Option(min=1000, help="Parameters of the model.")] = 1_000_000,
    sizes: Annotated[str, typer.Option(help="Numbers of clients of groups.")] = "100,1000",
    clients: Annotated[int, typer.Option(min=4, help="Clients of whole rounds.")] = 100,
    rounds: Annotated[int, typer.Option(min=0, help="Measured rounds; 0: none.")] = 2,
    as_json: report.JsonOption = False,
    save: report.SaveOption = False,
) -> None:
    """Measure secure aggregation, compared with Flower's SecAgg+ and with its key streams, and whole rounds."""
    rows: list[tuple[report.Cell, ...]] = []
    mask_s = limit_of_a_mask(parameters)
    version = ""
    for size in map(int, sizes.split(",")):
        num_dropped = max(1, size // 20)
        found = measure(size, num_dropped, parameters)
        theirs = measure_flower(found.graph, num_dropped, parameters) if size <= MAX_PEER else {}
        version = theirs.get("version", version)
        rows += list_rows(found, theirs, num_dropped, parameters, mask_s)
    notes = [
        f"{parameters / 1e6:g} M parameters; CPU time of one process. The limit is the key stream of the masks, "
        f"{1e3 * mask_s:.2f} ms each, and one pass over memory.",
        f"Flower {version}: `RandomState` with a seed of 32 bits, entries of 64 bits; groups of up to {MAX_PEER} only."
        if version
        else "Flower was not measured: `make bench-peers` creates its environment.",
    ]
    finished = report.Report(
        name="secure_aggregation", title="Secure aggregation", columns=COLUMNS, rows=tuple(rows), notes=tuple(notes)
    )
    whole: report.Report | None = None
    if rounds:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            whole = secure_rounds.compare(Path(folder), clients, parameters, rounds)
    report.finish(finished, as_json, save, parts={"rounds": whole} if whole else {})


def list_rows(
    found: Measured, theirs: Mapping[str, Any], num_dropped: int, num_parameters: int, mask_s: float
) -> list[tuple[report.Cell, ...]]:
    """Return the rows of a group."""
    size, degree = found.graph.size, found.graph.degree
    group = f"{size:,}, shares for {degree}, masks with {found.graph.num_peers}"
    cores = len(os.sched_getaffinity(0))
    their_bytes = theirs["update_bytes"] / num_parameters if theirs else None
    server_limit_s = found.num_removed * mask_s
    rows = (
        ("client, s", found.client_s, theirs.get("client_s"), (found.graph.num_peers + 1) * mask_s),
        (f"server, {num_dropped} lost, s", found.server_s, theirs.get("server_s"), server_limit_s),
        (f"the same on {cores} cores, s", found.server_cores_s, None, server_limit_s / cores),
        ("update, bytes a parameter", BYTES_PER_ENTRY, their_bytes, None),
        ("keys and shares sent, bytes", found.sent_bytes, theirs.get("sent_bytes"), None),
        ("keys and shares received, bytes", found.received_bytes, theirs.get("received_bytes"), None),
    )
    return [
        (group, name, ours, their, their / ours if their else None, limit, ours / limit if limit else None)
        for name, ours, their, limit in rows
    ]


def measure(size: int, num_dropped: int, num_parameters: int) -> Measured:
    """Run an attempt of a group; measure its first client and the server."""
    setup = make_setup(size, num_parameters)
    graph = Graph.of(setup.options, size)
    keys = [Ed25519PrivateKey.generate() for _ in range(size)]
    public = [key.public_key().public_bytes_raw() for key in keys]
    spent = Stopwatch()
    group = [
        Participant(setup, public_key, key.sign, ParticipantLimits())
        for public_key, key in zip(public, keys, strict=True)
    ]
    advertised = [spent.run(each.advertise, place == 0) for place, each in enumerate(group)]
    members = [
        Member(f"c-{place}", public[place], KeyAdvertisement.from_bytes(content))
        for place, content in enumerate(advertised)
    ]
    rosters = [unmasking.make_roster(members, place) for place in range(size)]
    shared = [
        spent.run(functools.partial(each.share, roster), place == 0)
        for place, (each, roster) in enumerate(zip(group, rosters, strict=True))
    ]
    sent = {place: SealedShares.from_bytes(content) for place, content in enumerate(shared)}
    dropped = tuple(range(1, size, size // num_dropped))[:num_dropped]
    survivors = Survivors(tuple(sorted({*range(size)} - {*dropped})), dropped)
    total, plain = np.zeros(num_parameters + 1, np.uint32), np.zeros(num_parameters + 1, np.uint32)
    rng = np.random.default_rng(1)
    held = [unmasking.route_shares(graph, place, sent) for place in range(size)]
    for place in survivors.survivors:
        vector = rng.integers(0, 1 << 20, num_parameters + 1, np.uint32)
        plain += vector
        with masks_left_out(place > 0 and size > MAX_CHECKED):
            spent.run(functools.partial(group[place].mask, held[place], vector), place == 0)
        total += vector
    request = unmasking.make_request(survivors, {})
    answers = [spent.run(functools.partial(group[place].answer, request), place == 0) for place in survivors.survivors]
    parts = {
        place: UnmaskAnswer.from_bytes(content) for place, content in zip(survivors.survivors, answers, strict=True)
    }
    server, again = Stopwatch(), total.copy()
    server.run(lambda: unmasking.remove_masks(setup, members, sent, survivors, parts, total), True)
    if size <= MAX_CHECKED and not np.array_equal(total, plain):
        raise RuntimeError("the sum without masks is not that of the vectors")
    begun = time.perf_counter()
    unmasking.remove_masks(setup, members, sent, survivors, parts, again, len(os.sched_getaffinity(0)))
    return Measured(
        graph=graph,
        client_s=spent.seconds,
        server_s=server.seconds,
        server_cores_s=time.perf_counter() - begun,
        sent_bytes=sum(len(each[0]) for each in (advertised, shared, answers)),
        received_bytes=sum(map(len, (rosters[0], held[0], request))),
        num_removed=count_masks(graph, survivors),
    )


def count_masks(graph: Graph, survivors: Survivors) -> int:
    """Return the number of masks that the server removes."""
    alive = frozenset(survivors.survivors)
    return len(alive) + sum(len(alive.intersection(graph.peers(place))) for place in survivors.dropped)


def make_setup(size: int, num_parameters: int) -> Setup:
    """Return the setup of a group of a job with the default options."""
    encoding = Encoding(size=num_parameters, clip=1.0, bits=20, modulus=32, max_examples=0.0, max_clients=size)
    return Setup("j-benchmark", 1, 1, "0" * 64, "0" * 64, SecureAggregation(), encoding, minimum=2)


class Stopwatch:
    """The CPU time of this process in some calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def run(self, call: Callable[[], Any], counts: bool) -> Any:
        """Call a function; its time is added if it counts."""
        begun = time.process_time()
        result = call()
        if counts:
            self.seconds += time.process_time() - begun
        return result


@contextlib.contextmanager
def masks_left_out(applies: bool) -> Generator[None]:
    """Leave out the masks of vectors, whose values have no effect on any time."""
    if applies:
        with mock.patch.object(primitives, "apply_masks"):
            yield
    else:
        yield


def limit_of_a_mask(num_parameters: int) -> float:
    """Return the CPU seconds of the key stream of one mask, in blocks that stay in the cache, and of one pass."""
    size_bytes = 4 * (1 << 15)
    room = memoryview(bytearray(size_bytes + primitives.ROOM_BYTES))
    vector, other = np.zeros((2, num_parameters), np.uint32)
    num_blocks = -(-num_parameters // (1 << 15))
    found: list[float] = []
    for _ in range(20):
        stream = primitives.MaskStream(bytes(32), with_gcm=True)
        begun = time.process_time()
        for _ in range(num_blocks):
            stream.read_into(room, size_bytes)
        vector += other
        found.append(time.process_time() - begun)
    return min(found)


def measure_flower(graph: Graph, num_dropped: int, num_parameters: int) -> Mapping[str, Any]:
    """Return the measurements of Flower; empty if it is not installed."""
    if not PEERS.exists():
        return {}
    numbers: Sequence[int] = (
        graph.size,
        min(graph.degree + 1, graph.size),
        graph.threshold,
        num_dropped,
        num_parameters,
    )
    command = [str(PEERS), str(THEIRS), *map(str, numbers)]
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0"}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return json.loads(done.stdout)


if __name__ == "__main__":
    typer.run(main)
