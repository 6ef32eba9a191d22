"""Traces over real processes: a receiver that is away, a server that is killed, and clients with spans of their own."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fedplat.cli import submission, watch
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from support import otlp, processes
from support.jobs import write_job

pytestmark = pytest.mark.slow

CLIENTS = 20
PROGRAM = Path(otlp.__file__).with_name("traced_clients.py")
JOB = write_job(
    "traced",
    population="many",
    trainer="add",
    rounds=2,
    selection={"goal": CLIENTS, "min_fraction": 1.0},
    deadlines={"heartbeat_s": 0.5},
)


def trace_id_of(job: str, round_: int) -> bytes:
    return hashlib.sha256(f"{job}/{round_}/1".encode()).digest()[:16]


def test_a_killed_server_continues_its_traces(tmp_path: Path) -> None:
    """Round 1 ends while the receiver is away; in round 2, while all clients train, the server is killed."""
    with (
        otlp.receiving() as receiver,
        processes.server(tmp_path / "server", "--traces", receiver.address, "--json-log") as server,
        server.admin() as admin,
    ):
        receiver.away.set()
        command = [sys.executable, str(PROGRAM), receiver.address, str(tmp_path), str(CLIENTS)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as clients:
            assert clients.stdin is not None
            assert clients.stdout is not None
            try:
                clients.stdin.write(f"{server.ticket('many', CLIENTS)}\n")
                clients.stdin.flush()
                model = Parameters.from_arrays({"weight": np.zeros(4, np.float32)})
                job = submission.submit(admin, submission.Submission(JOB, parse_job(JOB), model)).job_id
                assert [clients.stdout.readline() for _ in range(CLIENTS)] == ["training\n"] * CLIENTS
                assert receiver.refused.wait(processes.PATIENCE_S)
                server.kill()
                receiver.away.clear()
                server.start()
                clients.stdin.write("go on\n")
                clients.stdin.flush()
                ended = watch.follow(admin, job, watch.View(lambda _: None, lambda _: None))
                assert ended.status == admin_pb2.JOB_STATUS_COMPLETED
            finally:
                clients.stdin.close()
        assert server.stop() == 0
    for round_ in (1, 2):
        trace_id = trace_id_of(job, round_)
        own = {span.span_id: span for span in receiver.spans(trace_id)}
        assert Counter(span.name for span in own.values()) == {
            "attempt TRAIN": 1,
            "select": 1,
            "collect": 1,
            "commit": 1,
            "assignment": CLIENTS,
        }
        theirs = receiver.spans(trace_id, "hospital")
        trained = [own[span.parent_span_id] for span in theirs if span.name == "train"]
        assert Counter(span.name for span in trained) == {"assignment": CLIENTS}
        assert len({span.span_id for span in trained}) == CLIENTS
    assert f'"trace_id": "{trace_id_of(job, 2).hex()}"' in server.log_text()


def test_the_receiver_is_read_from_the_variables_of_opentelemetry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with otlp.receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=hospitals")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "fedplat-eu")
        with processes.server(tmp_path / "server") as server, server.admin() as admin:
            admin.status()
        assert receiver.headers
        assert {each["x-tenant"] for each in receiver.headers} == {"hospitals"}
        assert {name for name, _ in receiver.received()} == {"fedplat-eu"}
