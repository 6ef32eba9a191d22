"""Flower apps on a real server with real clients: from the command line to the model, through crashes."""

from __future__ import annotations

import functools
import hashlib
import re
import signal
import subprocess
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from fedplat_server.cli import commands
from support import deployment, flower_digits, process_logs, processes
from support.deployment import run_fedplat
from support.jobs import write_job

pytest.importorskip("flwr")
pytest.importorskip("sklearn")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
EXAMPLE = processes.ROOT / "examples" / "flower" / "digits"
NUM_CLIENTS = 3
REPORTING = """
class Reporting(FedAvg):
    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        with open("errors.txt", "a") as file:
            file.writelines(f"{each.error.code} {each.error.reason}\\n" for each in replies if each.has_error())
        return super().aggregate_train(server_round, replies)
"""
STRATEGY = """
from flwr.serverapp.strategy import FedAdam

class Counting(FedAdam):
    def __init__(self, **options):
        super().__init__(**options)
        self.rounds = []

    def aggregate_train(self, server_round, replies):
        self.rounds.append(server_round)
        assert self.rounds == list(range(1, server_round + 1)), self.rounds
        return super().aggregate_train(server_round, replies)
"""


def replace(file: Path, parts: Mapping[str, str]) -> None:
    text = file.read_text()
    for old, new in parts.items():
        assert old in text
        text = text.replace(old, new, 1)
    file.write_text(text)


def break_the_server(app: Path) -> None:
    begin = "    random.seed(0)"
    replace(app / "digits" / "server_app.py", {begin: f'    raise ValueError("no such city")\n{begin}'})
    (app / "fedplat.toml").write_text("[retry]\nbase_s = 0.1\nmax_attempts = 2\n")


def break_a_client(app: Path) -> None:
    parts = {
        "app = ServerApp()\n": f"app = ServerApp()\n{REPORTING}",
        "strategy = FedAvg(": "strategy = Reporting(",
    }
    replace(app / "digits" / "server_app.py", parts)
    failing = '    if context.node_config["partition-id"] == 1:\n        raise ValueError("no pictures")\n'
    begin = "    arrays, (rows, _), config"
    replace(app / "digits" / "client_app.py", {begin: failing + begin})


@pytest.fixture(scope="module")
def apps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The app, one whose ServerApp fails, and one whose ClientApp fails for a node."""
    folder = tmp_path_factory.mktemp("apps")
    made = {name: flower_digits.write_app(folder, EXAMPLE, name) for name in ("digits", "broken", "failing")}
    break_the_server(made["broken"])
    break_a_client(made["failing"])
    return made


@pytest.fixture(scope="module")
def flower_server(apps: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[processes.Server]:
    folder = tmp_path_factory.mktemp("flower")
    (folder / "own.py").write_text(STRATEGY)
    options = ["--plugin", f"flower-strategies.counting={folder}/own.py:Counting"]
    for name, app in apps.items():
        options += ["--flower-app", f"{name}={app}"]
    with processes.server(folder / "server", *options) as running:
        yield running


class Deployment:
    """An app on a server, and its clients."""

    def __init__(self, folder: Path, app: Path, server: processes.Server) -> None:
        self.folder, self.app, self.server = folder, app, server
        self.clients: list[subprocess.Popen[bytes]] = []
        self.job_id = ""

    def submit(self, *options: str, status: int = 0) -> str:
        arguments = ["flower", "run", str(self.app), "--server", self.server.address, "--population", self.app.name]
        said = run_fedplat(self.server, *arguments, "--no-follow", *options, status=status)
        if status == 0:
            self.job_id = re.findall(rf"job {self.app.name} \((j-\w+)", said)[0]
        return said

    def job(self) -> admin_pb2.Job:
        with self.server.admin() as admin:
            return admin.show_job(self.job_id)

    def num_waiting(self) -> int:
        with self.server.admin() as admin:
            return deployment.num_waiting(admin, self.app.name)

    def until(self, condition: Callable[[admin_pb2.Job], bool], what: str) -> admin_pb2.Job:
        processes.until(lambda: condition(self.job()), what)
        return self.job()

    def until_ended(self) -> admin_pb2.Job:
        ended = (admin_pb2.JOB_STATUS_COMPLETED, admin_pb2.JOB_STATUS_FAILED, admin_pb2.JOB_STATUS_PAUSED)
        return self.until(lambda job: job.status in ended, "the end of the job")

    def start_client(self, number: int) -> None:
        """Start a client, or start it again: then it needs no ticket."""
        data_dir, ticket = self.folder / f"client-{number}", self.folder / f"ticket-{number}"
        command = [str(processes.BIN / "fedplat-client"), "flower", str(self.app), "--data-dir", str(data_dir)]
        command += ["--node-config", f"partition-id={number}", "--node-config", f"num-partitions={NUM_CLIENTS}"]
        if not data_dir.exists():
            ticket.write_text(self.server.ticket(self.app.name))
        command += ["--ticket-file", str(ticket)]
        with process_logs.open_log(self.folder / f"client-{number}.log") as log:
            self.clients.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    def model(self) -> bytes:
        """A digest of the arrays of the last version."""
        with self.server.admin() as admin:
            model = deployment.exported(admin, self.job_id, self.folder)
        arrays = [name.encode() + model[name].tobytes() for name in sorted(model) if not name.startswith("__")]
        return hashlib.sha256(b"".join(arrays)).digest()


@contextmanager
def deployed(folder: Path, app: Path, server: processes.Server) -> Generator[Deployment]:
    made = Deployment(folder, app, server)
    try:
        for number in range(NUM_CLIENTS):  # one after the other: the order of enrollment is that of the nodes
            made.start_client(number)
            processes.until(lambda count=number: made.num_waiting() > count, "a client")
        yield made
    finally:
        for client in made.clients:
            client.terminate()
        for client in made.clients:
            client.wait(processes.PATIENCE_S)


def train_undisturbed(made: Deployment) -> bytes:
    """Train two rounds; the model."""
    made.submit("--run-config", "num-server-rounds=2")
    job = made.until_ended()
    assert job.status == admin_pb2.JOB_STATUS_COMPLETED, job.reason
    assert job.round == 4  # two rounds of training, two of evaluation
    metrics = job.current.client_metrics
    assert metrics["server-round"] == 2.0
    assert metrics["accuracy"] > 0.5
    assert "flower-apps.digits" in run_fedplat(made.server, "status")
    return made.model()


def is_collecting_after(num_sets: int, job: admin_pb2.Job) -> bool:
    """Whether later messages are in progress, or the job has ended."""
    return job.round >= num_sets and job.current.phase >= admin_pb2.ATTEMPT_PHASE_COLLECTING


def test_a_server_and_a_client_that_are_killed_change_nothing_and_a_changed_app_pauses_its_job(
    tmp_path: Path, apps: dict[str, Path], flower_server: processes.Server
) -> None:
    """One test, because each part takes the same clients, which take longest to start."""
    with deployed(tmp_path, apps["digits"], flower_server) as made:
        undisturbed = train_undisturbed(made)
        kill_after_each_set_of_messages(made)
        assert made.model() == undisturbed
        assert "nothing is broken" in deployment.run(commands.app, "verify", "--data-dir", str(flower_server.folder))
        change_the_app(made)


def kill_after_each_set_of_messages(made: Deployment) -> None:
    made.submit("--run-config", "num-server-rounds=2")
    for num_sets in (1, 2, 3):
        made.until(functools.partial(is_collecting_after, num_sets), "messages")
        made.clients[1].send_signal(signal.SIGKILL)
        made.server.kill()
        made.server.start()
        made.start_client(1)
    job = made.until_ended()
    assert job.status == admin_pb2.JOB_STATUS_COMPLETED, job.reason


def change_the_app(made: Deployment) -> None:
    made.submit("--run-config", "num-server-rounds=200")
    made.until(lambda job: job.round >= 1, "messages")
    made.server.kill()
    with (made.app / "digits" / "task.py").open("a") as file:
        file.write("\n# changed\n")
    made.server.start()
    job = made.until(lambda job: job.status == admin_pb2.JOB_STATUS_PAUSED, "the pause")
    assert "flower-apps.digits" in job.reason
    run_fedplat(made.server, "job", "resume", made.job_id)
    round_ = job.round
    made.until(lambda job: job.round > round_ + 1, "other messages")
    run_fedplat(made.server, "job", "cancel", made.job_id)


def test_an_app_that_fails_ends_the_job_with_its_own_words(
    tmp_path: Path, apps: dict[str, Path], flower_server: processes.Server
) -> None:
    made = Deployment(tmp_path, apps["broken"], flower_server)
    made.submit()
    job = made.until_ended()
    assert job.status == admin_pb2.JOB_STATUS_FAILED
    assert "the ServerApp of broken raised ValueError: no such city" in job.reason
    assert "server_app.py, line" in job.reason


def test_a_failed_client_is_an_error_reply(
    tmp_path: Path, apps: dict[str, Path], flower_server: processes.Server
) -> None:
    with deployed(tmp_path, apps["failing"], flower_server) as made:
        made.submit("--run-config", "num-server-rounds=1")
        job = made.until_ended()
        assert job.status == admin_pb2.JOB_STATUS_COMPLETED, job.reason
        (errors,) = (flower_server.folder / "flower" / job.job_id).glob("errors.txt")
        (line,) = errors.read_text().splitlines()
        failure = "the ClientApp of failing, called with train, raised ValueError: no pictures"
        assert line.startswith(f"2 UserCodeError: {failure}")


def test_a_server_without_the_app_says_how_to_get_it(server: processes.Server, tmp_path: Path) -> None:
    said = Deployment(tmp_path, EXAMPLE, server).submit(status=1)
    assert "the server has no such Flower app; it has none" in said
    assert "--flower-app digits=FOLDER" in said
    assert "Traceback" not in said


ROUNDS = 3
RULE = write_job(
    "rule",
    population="rule",
    trainer="digits",
    rounds=ROUNDS,
    selection={"goal": 2, "min_fraction": 1.0, "wait_for": 2},
    config={"lr": 0.1},
    aggregation={"rule": "flower", "strategy": "counting", "options": {"eta": 0.04, "tau": 0.01}},
    evaluation={"clients": {"evaluator": "digits", "goal": 2}},
    retry={"base_s": 0.1},
)


def test_a_client_app_and_a_strategy_in_an_ordinary_job(flower_server: processes.Server, tmp_path: Path) -> None:
    """A strategy of Flower is the rule; it continues from its memory, which is stored with the version."""
    app = flower_digits.write_app(tmp_path, EXAMPLE)
    clients: list[list[str]] = []
    for number in range(2):
        ticket = tmp_path / f"{number}.ticket"
        ticket.write_text(flower_server.ticket("rule"))
        command = [str(processes.BIN / "fedplat-client"), "flower", str(app), "--ticket-file", str(ticket)]
        options = ["--label", f"partition_id={number}", "--node-config", "num-partitions=2"]
        clients.append(
            [*command, *options, "--run-config", "local-epochs=2", "--data-dir", str(tmp_path / str(number))]
        )
    rng = np.random.default_rng(1)
    arrays = {"weight": rng.normal(0, 0.1, (64, 10)).astype("f4"), "bias": np.zeros(10, np.float32)}
    with flower_server.admin() as admin:
        (tmp_path / "rule.toml").write_text(RULE)
        (tmp_path / "unused.safetensors").write_bytes(Parameters.from_arrays(arrays).to_bytes())
        run_fedplat(flower_server, "job", "submit", str(tmp_path / "rule.toml"))
        with processes.processes(clients, tmp_path / "clients.log"):
            processes.until(lambda: len(admin.list_versions("rule")) > 1, "a version")
            flower_server.kill()
            flower_server.start()
            events = list(admin.watch_job("rule"))
    assert events[-1].to_state == "COMPLETED"
    scores = [event.metrics["eval_acc"] for event in events if "eval_acc" in event.metrics]
    assert len(scores) >= ROUNDS
    assert scores[-1] > scores[0] + 0.1
    versions = [event for event in events if event.entity == "version"]
    assert {event.round for event in versions} >= set(range(1, ROUNDS + 1))
