"""One client of a Flower app among honest ones, over real sockets: it neither ends the job nor sets its model."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

from fedplat.flower import layout, records
from fedplat.flower.records import INDEX, MessageFile
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from support import daemons, flower
from support.jobs import write_job

pytestmark = [pytest.mark.timeout(120), pytest.mark.calm("the app runs in a process of its own")]
NUM_CLIENTS = 7
SELECTION = {"goal": 1, "over_selection": 1.0, "min_fraction": 1e-9}


def reply(value: float = 1.0, size: int = 5, num_examples: int = 1) -> bytes:
    arrays = ArrayRecord({"0": Array(np.full((3, 4), value, "f4")), "1": Array(np.full(size, value, "f4"))})
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": num_examples})})
    return records.encode(MessageFile(content)).to_bytes()


def hidden(values: npt.NDArray[np.float64]) -> bytes:
    """Return a reply that has an array in serialized bytes, and claims its shape: only a modified client sends it."""
    out = io.BytesIO()
    np.save(out, values)
    entries = (
        layout.ArrayEntry("0", "0", layout.NUMPY, "float64", (3, 4)),
        layout.ArrayEntry("1", "1"),
    )
    metrics = layout.RecordEntry("metrics", "metrics", values={"num-examples": 1})
    index = layout.Index((layout.RecordEntry("arrays", "arrays", entries), metrics))
    tensors = {
        "0": np.frombuffer(out.getvalue(), np.uint8),
        "1": np.ones(5, np.float32),
        INDEX: np.frombuffer(msgspec.msgpack.encode(index), np.uint8),
    }
    return Parameters.from_arrays(tensors).to_bytes()


async def test_bad_replies_cost_their_senders_and_not_the_job(folder: Path, tmp_path: Path) -> None:
    """The first has another shape, the second hides NaN, the third another shape, and the last claims too much."""
    strategy = f"FedAvg(fraction_evaluate=0.0, min_train_nodes={NUM_CLIENTS})"
    app = flower.write_app(tmp_path, server=flower.strategy_server(strategy).replace("num_rounds=3", "num_rounds=1"))
    async with daemons.running(folder, flower_apps={app.name: str(app.folder)}) as site:
        more = f'[flower]\napp = "{app.name}"\n[retry]\nmax_attempts = 1\n'
        job = await site.operator.start(write_job("app", rounds=1_000_000, selection=SELECTION, more=more))
        watch = site.operator.jobs.WatchJob(admin_pb2.WatchJobRequest(job=job, progress_every_s=0.01))
        told = await anext(event async for event in watch if event.entity == "progress")
        watch.cancel()
        assert told.kind == admin_pb2.ATTEMPT_KIND_WARM_START
        assert told.reason.endswith("may wait until it has the clients that it needs: it has 0 clients so far")
        clients = await site.fleet(NUM_CLIENTS)
        work = [asyncio.create_task(each.assignment()) for each in clients]
        tokens = [(await each).token for each in work]
        wrong = reply(9.0, size=4), hidden(np.full((3, 4), np.nan)), hidden(np.ones((4, 3)))
        contents = [*wrong, reply(), reply(), reply(), reply(3.0, num_examples=10**15)]
        for client, token, content in zip(clients, tokens, contents, strict=True):
            await client.deliver(token, content)
        await site.operator.until(job, "job", "COMPLETED")
        reasons = await site.operator.reasons(job)
        names = [each.client_id for each in clients]
        for name, text in zip(
            names, ("shapes or kinds of arrays", "REJECTED_NONFINITE", "it claims to be"), strict=False
        ):
            assert reasons[name].startswith("REJECTED"), reasons
            assert text in reasons[name]
        assert [reasons[name] for name in names[3:]] == ["MERGED"] * 4
        model = await site.operator.model(job)
        np.testing.assert_allclose(model["1"], (3 * 1.0 + 10 * 3.0) / 13)
