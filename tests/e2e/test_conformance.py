"""`fedplat conformance`: fedplat's own client passes it, and a client that deviates from the protocol fails it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fedplat.testing.wire import calls
from fedplat_server.errors import Code
from support.docs.blocks import ROOT
from support.processes import BIN

pytestmark = pytest.mark.slow
TRAINER = ROOT / "examples/conformance/trainer.py"
CLIENT = f"{BIN}/fedplat-client run --trainer conformance={TRAINER}:train --evaluator conformance={TRAINER}:evaluate"


FOREIGN = {"http": [], "grpc": ["upload_too_large_for_a_proxy"]}
"""The cases that a transport does not have."""


def conformance(client: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [f"{BIN}/fedplat", "conformance", "--client", client, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.parametrize("transport", FOREIGN)
def test_the_client_in_python_passes_all_cases(transport: str) -> None:
    done = conformance(CLIENT, "--json", "--transport", transport)
    found = json.loads(done.stdout)
    others = [(each["name"], each["outcome"]) for each in found["cases"] if each["outcome"] != "passed"]
    assert others == [(name, "skipped") for name in FOREIGN[transport]], found
    assert done.returncode == 0
    assert len(found["cases"]) > 40


def test_the_codes_are_those_of_the_server() -> None:
    assert {name: Code[name].status for name in calls.STATUSES} == dict(calls.STATUSES)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--client", "true", "--only", "nothing"], "there is no case 'nothing'; there are: round,"),
        (["--client", "'"], "cannot be read"),
        (["--client", ""], "the command is empty"),
        (["--client", "true", "--transport", "auto"], "'auto' is not one of 'http', 'grpc'"),
        (["--client", "/nowhere/client"], "the command '/nowhere/client' cannot be started: No such file"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(arguments: list[str], said: str) -> None:
    command = [f"{BIN}/fedplat", "conformance", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_that_is_no_client_fails_with_its_log(tmp_path: Path) -> None:
    script = "import sys; print('it cannot start', file=sys.stderr); sys.exit(3)"
    done = conformance(shlex.join([sys.executable, "-c", script]), "--only", "round")
    assert done.returncode == 1
    assert "FAIL round: the client ended with the exit status 3: the client did not check in" in done.stdout
    assert "it cannot start" in done.stdout
