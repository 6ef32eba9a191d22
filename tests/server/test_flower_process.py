"""The process of a ServerApp tells the daemon whose replies its strategy could not use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import numpy as np
import pytest

from fedplat_server.flower import protocol
from fedplat_server.flower.protocol import AdvanceRun, ListClients, ListedClients, NextMessages, RunStarted, StartRun

pytest.importorskip("flwr")
CLIENTS = ("c-one", "c-two", "c-three", "c-four")


class Process:
    """The process of an app, driven as the daemon does."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "fedplat_server.flower.process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder)
        self._requests, self._answers = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)

    def ask(self, request: protocol.Request) -> Any:
        """Return the answer to a request; meanwhile all clients wait."""
        protocol.write_frame(self._requests, request)
        while True:
            size = int.from_bytes(self._answers.read(4), "big")
            answer = msgspec.msgpack.decode(self._answers.read(size), type=protocol.Answer)
            if not isinstance(answer, ListClients):
                return answer
            protocol.write_frame(self._requests, ListedClients(CLIENTS))

    def close(self) -> None:
        """End the process."""
        self._requests.close()
        self._process.wait(60)
        self._answers.close()


def test_a_refused_reply_is_named_by_its_client(tmp_path: Path) -> None:
    from flwr.app import ArrayRecord, MetricRecord, RecordDict

    from fedplat.flower import records
    from fedplat.flower.records import MessageFile
    from support.flower import strategy_server, write_app

    app = write_app(tmp_path, server=strategy_server("FedAvg(fraction_evaluate=0.0, min_train_nodes=4)"))
    process = Process(tmp_path)
    try:
        assert process.ask(StartRun(app.name, str(app.folder), {}, max_weight_factor=10.0)) == RunStarted()
        message, state = str(tmp_path / "message"), str(tmp_path / "state")
        sent = process.ask(AdvanceRun({}, {}, message, state))
        assert isinstance(sent, NextMessages)
        assert set(sent.cohort) == set(CLIENTS)
        replies = dict[str, str]()
        for client in CLIENTS:
            shapes = [(3,), (5,)] if client == "c-three" else [(3, 4), (5,)]
            arrays = ArrayRecord([np.ones(shape, np.float32) for shape in shapes])
            content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
            replies[client] = str(tmp_path / client)
            Path(replies[client]).write_bytes(records.encode(MessageFile(content)).to_bytes())
        following = process.ask(AdvanceRun(replies, {}, message, state))
        assert isinstance(following, NextMessages)
        assert following.refused == {"c-three": "its shapes or kinds of arrays are not those of most replies"}
    finally:
        process.close()
