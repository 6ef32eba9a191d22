"""The client in TypeScript: on Node and in Chromium, beside clients in Python, killed, and with planted deviations."""

from __future__ import annotations

import contextlib
import functools
import gzip
import http.server
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat_client import Client, Task, TrainResult
from support import deployment, processes, typescript
from support.clients import at_work
from support.dashboard.browser import chromium
from support.docs.blocks import ROOT
from support.jobs import write_job

pytestmark = pytest.mark.slow
MODEL = Parameters.from_arrays({"weight": np.zeros(2, np.float32), "bias": np.zeros(1, np.float32)})
TRANSPORTS = ("http", "grpc")
ROUNDS, EPOCHS, RATE = 3, 5, 0.1
DEVIATIONS = {
    "a counter that stays": ("session.js", "++this.counter", "(this.counter = 1n)", "two_rounds"),
    "another tag of signatures": ("signing.js", "fedplat call 1", "fedplat call 2", "round"),
    "a model instead of an update": ("models.js", "rounded[index] - before[index]", "rounded[index]", "round"),
    "a digest that is not checked": ("client.js", "digest !== model.digest", "false", "model_damaged"),
    "a retry window that is ignored": ("client.js", "return earliest + ", "return 0 * ", "no_work"),
    "an update without secure aggregation": (
        "client.js",
        "assignment.secureSetup.length > 0",
        "false",
        "secure_aggregation_refused",
    ),
    "an upload that begins again": (
        "client.js",
        "at = await this.query(token, digest, patience)",
        "at = 0",
        "upload_cut",
    ),
    "a client id that is not kept": ("node.js", "client_id: clientId }", 'client_id: "" }', "killed_in_training"),
    "a client that goes on when it is revoked": ("errors.js", 'REVOKED: "end"', 'REVOKED: "retry"', "revoked"),
    "a failure after a stop order": ("client.js", "if (this.isEnded)", "if (false)", "stopped_by_the_server"),
    "another key for each enrollment": (
        "session.js",
        "idempotencyKey: this.identity.idempotencyKey",
        "idempotencyKey: `key ${Math.random()}`",
        "enrollment_lost",
    ),
}
"""Deviations of a client from the protocol: the file, the change, and the case that fails."""


@pytest.fixture(scope="module")
def package() -> Path:
    return typescript.build()


def conformance(folder: Path, *options: str) -> dict[str, Any]:
    command = [f"{processes.BIN}/fedplat", "conformance", "--client", "node examples/conformance.mjs", "--json"]
    done = subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (1 if found["wrong"] else 0)
    return found


def test_the_golden_vectors_are_what_it_makes(package: Path) -> None:
    command = ["node", "test/vectors.mjs", str(ROOT / "tests/wire/vectors")]
    done = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "all vectors agree\n"), done.stderr


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_it_passes_all_cases(package: Path, transport: str) -> None:
    found = conformance(package, "--transport", transport)
    foreign = {"grpc": ["upload_too_large_for_a_proxy"]}.get(transport, [])
    others = [(each["name"], each["outcome"]) for each in found["cases"] if each["outcome"] != "passed"]
    assert others == [(name, "skipped") for name in foreign], found
    assert found["passed"] > 40


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", DEVIATIONS)
def test_a_planted_deviation_fails(package: Path, tmp_path: Path, name: str, transport: str) -> None:
    file, old, new, case = DEVIATIONS[name]
    for each in ("dist", "examples"):
        shutil.copytree(package / each, tmp_path / each)
    shutil.copy(package / "package.json", tmp_path)
    (tmp_path / "node_modules").symlink_to(package / "node_modules")
    changed = tmp_path / "dist" / file
    text = changed.read_text()
    assert text.count(old) == 1, f"the deviation {name!r} is not of this code"
    changed.write_text(text.replace(old, new))
    found = conformance(tmp_path, "--only", case, "--case-time", "20", "--transport", transport)
    assert [each["outcome"] for each in found["cases"]] == ["failed"], found


def test_the_package_has_what_it_needs_and_is_small(package: Path, tmp_path: Path) -> None:
    files = typescript.pack(tmp_path)
    assert {"package.json", "README.md", "LICENSE", "dist/node.js", "dist/node.d.ts", "dist/web.js"} <= {*files}
    assert not [name for name in files if name.startswith(("src/", "test/", "node_modules/"))]
    assert len(gzip.compress((package / "build/web.js").read_bytes())) <= 40 * 2**10


def rows(number: int) -> np.ndarray[Any, Any]:
    """The rows of `examples/linear.mjs`."""
    index = np.arange(64)
    x1, x2 = (index * 7 + number * 3) % 16 / 16, (index * 5 + number * 11) % 16 / 16
    return np.stack([x1, x2, 2 * x1 - x2 + 0.5 + 0.01 * number], axis=1)


def fit(weight: Any, bias: Any, number: int) -> None:
    """The training of `examples/linear.mjs`, in place."""
    data = rows(number)
    for _ in range(EPOCHS):
        error = data[:, :2] @ weight.astype(np.float64) + float(bias[0]) - data[:, 2]
        weight -= (RATE / len(data) * (error @ data[:, :2])).astype(np.float32)
        bias -= np.float32(RATE / len(data) * error.sum())


def expected(numbers: list[int]) -> dict[str, Any]:
    """The model after all rounds: the mean of what the clients train."""
    weight, bias = np.zeros(2, np.float32), np.zeros(1, np.float32)
    for _ in range(ROUNDS):
        trained = [(weight.copy(), bias.copy()) for _ in numbers]
        for (its_weight, its_bias), number in zip(trained, numbers, strict=True):
            fit(its_weight, its_bias, number)
        weight = np.mean([each for each, _ in trained], axis=0, dtype=np.float32)
        bias = np.mean([each for _, each in trained], axis=0, dtype=np.float32)
    return {"weight": weight, "bias": bias}


def job(name: str, goal: int) -> str:
    config = {"epochs": EPOCHS, "learning_rate": RATE}
    selection = {"goal": goal, "min_fraction": 1.0}
    return write_job(name, population=name, trainer="linear", rounds=ROUNDS, selection=selection, config=config)


def python_client(ticket: str, folder: Path, number: int) -> Client:
    def train(task: Task) -> TrainResult:
        fit(task.parameters["weight"], task.parameters["bias"], number)
        return TrainResult(parameters=task.parameters, num_examples=64)

    client = Client.from_ticket(ticket, data_dir=folder / f"client-{number}")
    client.add_trainer("linear", train)
    return client


def compare(found: Parameters, numbers: list[int]) -> None:
    for name, values in expected(numbers).items():
        np.testing.assert_allclose(found[name], values, rtol=2e-6, atol=1e-7)


@contextlib.contextmanager
def node_client(
    package: Path, ticket: str, folder: Path, number: int, transport: str = "http"
) -> Generator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        ["node", "examples/node.mjs", str(folder), str(number)],
        cwd=package,
        env={**os.environ, "FEDPLAT_TICKET": ticket, "FEDPLAT_TRANSPORT": transport},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def pages(folder: Path) -> Generator[str]:
    """A server of files; its origin."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def origin(package: Path) -> Iterator[str]:
    with pages(package) as found:
        yield found


@pytest.fixture(scope="module")
def server(origin: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[processes.Server]:
    address = f"127.0.0.1:{processes.free_port()}"
    options = ("--http-listen", address, "--http-address", address, "--http-origin", origin)
    with processes.server(tmp_path_factory.mktemp("typescript") / "server", *options) as running:
        yield running
        assert running.stop() == 0
    assert "Traceback" not in running.log_text()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_it_trains_beside_clients_in_python_and_survives_a_kill(
    package: Path, server: processes.Server, tmp_path: Path, transport: str
) -> None:
    population = f"mixed-{transport}"
    ticket = server.ticket(population, 3)
    with server.admin() as admin:
        with at_work([python_client(ticket, tmp_path, number) for number in (1, 2)]):
            found = deployment.submit(admin, job(population, 3), MODEL)
            with node_client(package, ticket, tmp_path / "node", 0, transport) as first:
                assert first.stdout is not None
                for line in first.stdout:
                    if "round 2" in line:
                        break
                first.send_signal(signal.SIGKILL)
                first.wait()
            kept = json.loads((tmp_path / "node/identity.json").read_text())
            assert kept["client_id"]
            with node_client(package, ticket, tmp_path / "node", 0, transport):
                deployment.completed(admin, found)
        assert json.loads((tmp_path / "node/identity.json").read_text()) == kept
        compare(deployment.exported(admin, found, tmp_path), [0, 1, 2])


async def test_it_trains_in_a_tab_of_a_browser(
    package: Path, server: processes.Server, origin: str, tmp_path: Path
) -> None:
    ticket = server.ticket("tab", 2)
    with server.admin() as admin:
        found = deployment.submit(admin, job("tab", 2), MODEL)
        async with chromium() as browser:
            context = await browser.new_context(ignore_https_errors=True)
            page = await context.new_page()
            errors: list[str] = []
            page.on("pageerror", lambda error: errors.append(str(error)))
            await page.goto(f"{origin}/examples/web.html?number=5")
            await page.fill("#ticket", ticket)
            with at_work([python_client(ticket, tmp_path, 1)]):
                await page.click("text=Take part")
                for number in range(1, ROUNDS + 1):
                    await page.get_by_text(f"the task started: round {number} of").wait_for()
                await page.wait_for_function(
                    "count => document.querySelector('#log').textContent.split('done and reported').length > count",
                    arg=ROUNDS,
                )
                await page.click("#stop")
                await page.get_by_text("stopped", exact=False).wait_for()
                deployment.completed(admin, found)
            assert errors == []
        compare(deployment.exported(admin, found, tmp_path), [1, 5])


async def test_a_page_of_another_origin_cannot_call(server: processes.Server, package: Path) -> None:
    ticket = server.ticket("foreign")
    with pages(package) as foreign:
        async with chromium() as browser:
            page = await (await browser.new_context(ignore_https_errors=True)).new_page()
            await page.goto(f"{foreign}/examples/web.html")
            await page.fill("#ticket", ticket)
            await page.click("text=Take part")
            await page.get_by_text("the server does not answer").first.wait_for()


def test_what_it_cannot_use_is_one_sentence(package: Path, tmp_path: Path) -> None:
    for ticket, transport, said in (
        ("", "http", "this is not a ticket"),
        ("fpt1.??", "http", "the ticket is damaged"),
        ("", "quic", 'there is no transport "quic"; expected "http" or "grpc"'),
    ):
        with node_client(package, ticket, tmp_path, 0, transport) as process:
            text, _ = process.communicate(timeout=60)
        assert process.returncode == 1
        assert said in text
        assert "    at " not in text
