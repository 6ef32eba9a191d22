"""Processes that run other code get none of the daemon's passwords, tokens and keys."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from fedplat.admin import Profile
from fedplat_server import dashboard_process
from fedplat_server.child_environment import child_environment
from fedplat_server.dashboard_process import DashboardOptions
from fedplat_server.errors import FlowerRunError
from fedplat_server.flower.runs import FlowerRuns
from fedplat_server.workers.client import LocalRank
from fedplat_server.workers.protocol import WorkerInfo
from support import daemons
from support.daemons import update_of
from support.jobs import job_file

SECRETS = {
    "FEDPLAT_DATABASE": "postgresql://user:hunter2@db/fedplat",
    "PGPASSWORD": "hunter2",
    "AWS_SECRET_ACCESS_KEY": "hunter2",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=hunter2",
    "MYSQL_PWD": "hunter2",
    "HF_TOKEN": "hunter2",
    "Some_api_key": "hunter2",
    "CACHE": "redis://:hunter2@cache/0",
    "DB_PASS": "hunter2",
    "REDISCLI_AUTH": "hunter2",
    "DBPASSWORD": "hunter2",
    "CLIENTSECRET": "hunter2",
    "JWT_SIGNING_KEY": "hunter2",
    "STRIPE_KEY": "hunter2",
    "GITHUB_PAT": "hunter2",
    "ERRORS_TO": "https://hunter2@errors.example/7",
}
PLAIN = {"TOKENIZERS_PARALLELISM": "false", "KEYBOARD": "us", "KEYS_OF": "x", "PASSES": "3", "AUTHOR": "me@host"}


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (SECRETS | PLAIN).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
async def started(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[list[dict[str, str]]]:
    """The environments of the processes that would have been started."""
    found: list[dict[str, str]] = []

    async def start(*arguments: object, env: dict[str, str], **options: object) -> None:
        found.append(env)
        raise OSError("no process in this test")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    yield found
    (environment,) = found
    assert "hunter2" not in str(environment)
    assert environment.items() >= PLAIN.items()


def test_variables_that_are_kept() -> None:
    proxy = {"https_proxy": "http://me:x@proxy:3128"}  # without it, a network may be out of reach
    assert child_environment(proxy) == proxy
    environment = {**SECRETS, "FEDPLAT_CHILD_VARIABLES": "HF_TOKEN, CACHE"}
    assert child_environment(environment) == {name: SECRETS[name] for name in ("HF_TOKEN", "CACHE")}


async def test_the_dashboard(started: list[dict[str, str]]) -> None:
    options = DashboardOptions("127.0.0.1:0", ("localhost",), Profile())
    task = asyncio.ensure_future(dashboard_process.supervise(options))
    while not started:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_flower_app(started: list[dict[str, str]], tmp_path: Path) -> None:
    job = SimpleNamespace(job_id="j", spec=SimpleNamespace(flower=SimpleNamespace(app="digits")))
    blobs: Any = None
    runs = FlowerRuns({"digits": str(tmp_path)}, tmp_path, blobs, *cast(Any, (None, None, None)))
    with pytest.raises(FlowerRunError, match="no process in this test"):
        await runs.advance(cast(Any, job), blobs, {}, {})


async def test_the_rank_of_the_servers_own_data(started: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs the trainers of the server's owner."""
    monkeypatch.setattr(importlib.util, "find_spec", Mock())
    rank = LocalRank("gloo")
    with pytest.raises(OSError, match="no process in this test"):
        async with rank.start_task("train", WorkerInfo(1, "cpu"), Mock()):
            pass
    await rank.close()


@pytest.mark.slow
async def test_an_evaluator(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "evaluators.py"
    file.write_text("import os\ndef count(parameters):\n    return {'secrets': str(dict(os.environ)).count('hunter2')}")
    async with daemons.running(folder, evaluators={"count": f"{file}:count"}) as site:
        job = await site.operator.start(job_file(goal=1, rounds=1, more='[evaluation]\nserver = "count"'))
        client = await site.enroll()
        await client.deliver((await client.assignment()).token, update_of(daemons.initial_model(), 0))
        scores: dict[str, float] = {}

        async def is_scored() -> bool:
            scores.update((await site.operator.versions(job))[-1].metrics)
            return bool(scores)

        await daemons.until(is_scored, "the evaluator to score the version")
        assert scores == {"secrets": 0.0}
