"""A Flower app on a real server with real clients: from the command line to the model, through crashes."""

from __future__ import annotations

import functools
import hashlib
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from support import processes

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
APP = processes.ROOT / "examples" / "flower" / "digits"
NUM_CLIENTS = 3


def copy_app(folder: Path) -> Path:
    """The example; its strategy draws the same clients each time, and its pictures are in a file.

    A dozen processes import the app; scikit-learn would be half of the time of each.
    """
    app = shutil.copytree(APP, folder / "app", ignore=shutil.ignore_patterns("__pycache__"))
    pictures, digits = load_digits(return_X_y=True)
    np.savez(folder / "digits.npz", pictures=pictures, digits=digits)
    task = app / "digits" / "task.py"
    text = task.read_text()
    for old, new in (
        ("import torch\nfrom sklearn.datasets import load_digits\n", "import numpy as np\nimport torch\n"),
        ("= load_digits(return_X_y=True)\n", f"= np.load({str(folder / 'digits.npz')!r}).values()\n"),
    ):
        assert old in text
        text = text.replace(old, new)
    task.write_text(text)
    file = app / "digits" / "server_app.py"
    seeded = file.read_text().replace("    torch.manual_seed(0)\n", "    random.seed(0)\n    torch.manual_seed(0)\n")
    file.write_text(seeded.replace("import torch\n", "import random\n\nimport torch\n", 1))
    return app


class Deployment:
    """A server and its clients."""

    def __init__(self, folder: Path, app: Path, server: processes.Server) -> None:
        self.folder, self.app, self.server = folder, app, server
        self.clients: list[subprocess.Popen[bytes]] = []
        self.job_id = ""

    def run(self, *arguments: str, status: int = 0) -> str:
        """What a command of the operator says."""
        command = [str(processes.BIN / "fedplat"), "--profile", str(self.server.profile_path), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout if status == 0 else done.stderr

    def submit(self, *options: str, status: int = 0) -> str:
        arguments = ["flower", "run", str(self.app), "--server", self.server.address, "--population", "few"]
        said = self.run(*arguments, "--no-watch", *options, status=status)
        if status == 0:
            self.job_id = re.findall(r"job digits \((j-\w+)", said)[0]
        return said

    def job(self) -> admin_pb2.Job:
        with self.server.admin() as admin:
            return admin.show_job(self.job_id)

    def num_waiting(self) -> int:
        with self.server.admin() as admin:
            return admin.status().num_waiting

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
            ticket.write_text(self.server.ticket("few"))
        command += ["--ticket-file", str(ticket)]
        with (self.folder / f"client-{number}.log").open("ab") as log:
            self.clients.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    def model(self) -> bytes:
        """A digest of the arrays of the last version."""
        file = self.folder / "exported.safetensors"
        self.run("model", "export", self.job_id, "--output", str(file))
        model = Parameters.open(file)
        arrays = [name.encode() + model[name].tobytes() for name in sorted(model) if not name.startswith("__")]
        return hashlib.sha256(b"".join(arrays)).digest()


@contextmanager
def deployed(
    folder: Path, num_clients: int = NUM_CLIENTS, change: Callable[[Path], None] = lambda app: None
) -> Generator[Deployment]:
    """A deployment of the app as `change` has left it."""
    folder.mkdir()
    app = copy_app(folder)
    change(app)
    with processes.server(folder / "server", "--flower-app", f"digits={app}") as server:
        deployment = Deployment(folder, app, server)
        try:
            for number in range(num_clients):  # one after the other: the order of enrollment is that of the nodes
                deployment.start_client(number)
                processes.until(lambda count=number: deployment.num_waiting() > count, "a client")
            yield deployment
        finally:
            for client in deployment.clients:
                client.terminate()
            for client in deployment.clients:
                client.wait(processes.PATIENCE_S)


def train_undisturbed(deployment: Deployment) -> bytes:
    """Train two rounds; the model."""
    deployment.submit("--run-config", "num-server-rounds=2")
    job = deployment.until_ended()
    assert job.status == admin_pb2.JOB_STATUS_COMPLETED, job.reason
    assert job.round == 4  # two rounds of training, two of evaluation
    metrics = job.current.client_metrics
    assert metrics["server-round"] == 2.0
    assert metrics["accuracy"] > 0.5
    assert "flower-apps.digits" in deployment.run("status")
    return deployment.model()


def verify(deployment: Deployment) -> str:
    command = [str(processes.BIN / "fedplat-server"), "verify", "--data-dir", str(deployment.server.folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def is_collecting_after(num_exchanges: int, job: admin_pb2.Job) -> bool:
    """Whether a later exchange is in progress, or the job has ended."""
    return job.round >= num_exchanges and job.current.phase >= admin_pb2.ATTEMPT_PHASE_COLLECTING


def test_a_server_and_a_client_that_are_killed_change_nothing_and_a_changed_app_pauses_its_job(tmp_path: Path) -> None:
    """One test, because each part takes the same server and clients, which take longest to start."""
    with deployed(tmp_path / "run") as deployment:
        undisturbed = train_undisturbed(deployment)
        kill_after_each_exchange(deployment)
        assert deployment.model() == undisturbed
        assert "nothing is broken" in verify(deployment)
        change_the_app(deployment)


def kill_after_each_exchange(deployment: Deployment) -> None:
    deployment.submit("--run-config", "num-server-rounds=2")
    for num_exchanges in (1, 2, 3):
        deployment.until(functools.partial(is_collecting_after, num_exchanges), "an exchange")
        deployment.clients[1].send_signal(signal.SIGKILL)
        deployment.server.kill()
        deployment.server.start()
        deployment.start_client(1)
    job = deployment.until_ended()
    assert job.status == admin_pb2.JOB_STATUS_COMPLETED, job.reason


def change_the_app(deployment: Deployment) -> None:
    deployment.submit("--run-config", "num-server-rounds=200")
    deployment.until(lambda job: job.round >= 1, "an exchange")
    deployment.server.kill()
    with (deployment.app / "digits" / "task.py").open("a") as file:
        file.write("\n# changed\n")
    deployment.server.start()
    job = deployment.until(lambda job: job.status == admin_pb2.JOB_STATUS_PAUSED, "the pause")
    assert "flower-apps.digits" in job.reason
    deployment.run("job", "resume", deployment.job_id)
    round_ = job.round
    deployment.until(lambda job: job.round > round_ + 1, "another exchange")
    deployment.run("job", "cancel", deployment.job_id)


def break_the_server(app: Path) -> None:
    file = app / "digits" / "server_app.py"
    file.write_text(file.read_text().replace("    net = Net()\n", '    raise ValueError("no such city")\n'))
    (app / "fedplat.toml").write_text("[retry]\nbase_s = 0.1\nmax_attempts = 2\n")


def test_an_app_that_fails_ends_the_job_with_its_own_words(tmp_path: Path) -> None:
    with deployed(tmp_path / "run", num_clients=0, change=break_the_server) as deployment:
        deployment.submit()
        job = deployment.until_ended()
        assert job.status == admin_pb2.JOB_STATUS_FAILED
        assert "the ServerApp of digits raised ValueError: no such city" in job.reason
        assert "server_app.py, line" in job.reason


REPORTING = """
class Reporting(FedAvg):
    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        with open("errors.txt", "a") as file:
            file.writelines(f"{each.error.code} {each.error.reason}\\n" for each in replies if each.has_error())
        return super().aggregate_train(server_round, replies)
"""


def break_a_client(app: Path) -> None:
    file = app / "digits" / "server_app.py"
    text = file.read_text().replace("app = ServerApp()\n", f"app = ServerApp()\n{REPORTING}", 1)
    file.write_text(text.replace("strategy = FedAvg(", f"strategy = Reporting(min_train_nodes={NUM_CLIENTS}, "))
    client = app / "digits" / "client_app.py"
    failing = '    if context.node_config["partition-id"] == 1:\n        raise ValueError("no pictures")\n'
    client.write_text(client.read_text().replace("    net = Net()\n", f"{failing}    net = Net()\n", 1))


def test_a_failed_client_is_an_error_reply(tmp_path: Path) -> None:
    with deployed(tmp_path / "run", change=break_a_client) as deployment:
        deployment.submit("--run-config", "num-server-rounds=1")
        job = deployment.until_ended()
        assert job.status == admin_pb2.JOB_STATUS_COMPLETED, job.reason
        (errors,) = (deployment.server.folder / "flower" / job.job_id).glob("errors.txt")
        (line,) = errors.read_text().splitlines()
        failure = "the ClientApp of digits, called with train, raised ValueError: no pictures"
        assert line.startswith(f"2 UserCodeError: {failure}")


def test_a_server_without_the_app_says_how_to_get_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with processes.server(folder / "server") as server:
        said = Deployment(folder, APP, server).submit(status=1)
    assert "the server has no such Flower app; it has none" in said
    assert "--flower-app digits=FOLDER" in said
    assert "Traceback" not in said
