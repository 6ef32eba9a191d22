"""Runs one Flower app in this process, with local data sets, and prints its result as JSON.

    python tests/conformance/one_app.py APP_DIR [--run-config key=value ...]

It does what `fedplat flower run APP_DIR` does. The app is copied to a temporary folder, in which it runs, so that it
cannot change its checkout.
"""

from __future__ import annotations

import collections
import copy
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conformance import local_data
from fedplat.errors import FedplatError, FlowerError
from fedplat.flower.app import Config, FlowerApp, read_app
from fedplat.flower.apps import AppCheckpoint, ClientAppRunner, NodeAnswer, ServerAppRun
from fedplat.flower.grid import MessageSet, NodeReply
from fedplat.model import Parameters
from fedplat.simulation.flower import AppOptions, MessageSetResult, run_app

NODES = {"vertical-fl": 3, "federated-kaplan-meier-fitter": 2}
"""Numbers of nodes that the README files of apps ask for."""

SAVED = {"embedded-devices": "zalando-datasets/fashion_mnist", "supernode-authentication": "uoft-cs/cifar10"}
"""The data sets that nodes of these apps find in the folder that their node config names."""


def main(app_dir: Path, run_config: Annotated[list[str] | None, typer.Option()] = None) -> None:
    """Run an app, and print its result as the last line."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(shutil.copytree(app_dir, Path(root) / app_dir.name))
        os.chdir(folder)
        local_data.install(Path(root), "".join(file.read_text() for file in folder.rglob("*.py")))
        try:
            result: dict[str, Any] = run(folder, run_config or [])
        except FedplatError as exc:
            traceback.print_exc()
            result = {"ok": False, "reason": str(exc)}
        if "reason" in result:
            result["reason"] = result["reason"].replace(f"{folder}/", "").replace(root, "")
        print(json.dumps(result), flush=True)
        # Threads of libraries, and workers of data loaders, are of no interest any more.
        shutil.rmtree(root, ignore_errors=True)
        os._exit(0 if result["ok"] else 1)


def run(folder: Path, run_config: Sequence[str]) -> dict[str, Any]:
    """Run the app on the simulator, and return its result. Raises `FedplatError`."""
    app = read_app(folder)
    changes = [each for each in run_config if each.partition("=")[0] in app.run_config]
    add_node_config(folder)
    checkpoints = Checkpoints()
    sent: collections.Counter[str] = collections.Counter()
    failures: list[str] = []

    def observe(ended: MessageSetResult) -> None:
        sent[ended.message_type] += not ended.problem
        failures.extend(ended.failures)

    done = run_app(folder, AppOptions(changes, NODES.get(folder.name, 0)), on_messages=observe)
    if done.result.status != "COMPLETED":
        return {"ok": False, "reason": f"{done.result.reason}; {''.join(failures[:1])}"}
    resumes = checkpoints.can_continue(app.with_run_config(changes), done.result.num_clients)
    return {"ok": True, "sets": dict(sent), "nodes": done.result.num_clients, "resumes": resumes}


class Checkpoints:
    """What a server would save of a ServerApp: the state with which it waits for replies, and then the replies."""

    def __init__(self) -> None:
        """Observe all later calls of `ServerAppRun.advance` in this process."""
        self._is_observing = self._complete = True
        self._checkpoint: AppCheckpoint | None = None
        self._last: tuple[AppCheckpoint | None, list[NodeReply], str] | None = None
        advance = ServerAppRun.advance

        def observe(run: ServerAppRun, replies: Sequence[NodeReply] = ()) -> MessageSet | None:
            if not self._is_observing:
                return advance(run, replies)
            # The app may change the arrays that it receives.
            copies = [NodeReply(each.node_id, copy.deepcopy(each.content), each.error) for each in replies]
            sent = advance(run, replies)
            if replies and (sent is not None or self._last is None):
                self._last = self._checkpoint, copies, _compute_digest(sent)
            if sent is not None:
                self._checkpoint = AppCheckpoint(run.state, sent.file.to_parameters())
                self._complete = self._complete and bool(run.state)
            return sent

        ServerAppRun.advance = observe  # pyright: ignore[reportAttributeAccessIssue]

    def can_continue(self, app: FlowerApp, num_clients: int) -> bool:
        """Return whether there was a checkpoint each time, and a run from the last but one sends the last messages."""
        self._is_observing = False
        if not self._complete or self._last is None:
            return False
        checkpoint, replies, digest = self._last
        restored = ServerAppRun(app, lambda: range(num_clients), checkpoint=checkpoint)
        sent = restored.advance(replies)
        restored.close()
        if _compute_digest(sent) != digest:
            raise FlowerError("a run from a checkpoint sent other messages than the run that wrote it")
        return True


def _compute_digest(sent: MessageSet | None) -> str:
    if sent is None:
        return ""
    return sha256(repr((sent.message_type, sent.nodes)).encode() + sent.file.to_bytes()).hexdigest()


def add_node_config(folder: Path) -> None:
    """Give the nodes of some apps the node config that their README files ask for, with local data."""
    answer = ClientAppRunner.answer

    def answer_with_data(
        runner: ClientAppRunner,
        file: Parameters,
        node_id: int,
        node_config: Mapping[str, bool | int | float | str],
        run_config: Config | None = None,
        state: Parameters | None = None,
    ) -> NodeAnswer:
        config = {**node_config}
        if name := SAVED.get(folder.name):
            config["dataset-path"] = str(local_data.save_partition(folder.parent, node_id, name))
        if folder.name == "federated-analytics":
            config["db-url"] = local_data.write_database(folder.parent, node_id)
        return answer(runner, file, node_id, config, run_config, state)

    ClientAppRunner.answer = answer_with_data  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    typer.run(main)
