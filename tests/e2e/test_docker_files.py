"""The files that make the images agree with the code, with one another and with the docs; no engine is needed.

What an engine does with them is tried by hand, as docs/docker.md says.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.specifiers import SpecifierSet

from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat_client import Task

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = [ROOT / "docker" / f"Dockerfile.{app}" for app in ("server", "client")]
COMPOSE = (ROOT / "docker" / "compose.yaml").read_text()
FLOWER_COMPOSE = (ROOT / "docker" / "compose.flower.yaml").read_text()
JOB = parse_job((ROOT / "docker" / "job.toml").read_text())
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
NUM_CLIENTS = 10

each_dockerfile = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def instructions(path: Path) -> list[list[str]]:
    """Every instruction as its words; continued lines are joined."""
    text = path.read_text().replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def stages(path: Path) -> dict[str, list[list[str]]]:
    """The instructions of each stage, with those of the stages that it is made from."""
    found: dict[str, list[list[str]]] = {}
    name = ""
    for words in instructions(path):
        if words[0] == "FROM":
            name = words[3]
            found[name] = list(found.get(words[1], [words]))
        else:
            found[name].append(words)
    return found


def targets(path: Path) -> list[str]:
    """The stages that become images."""
    app = path.suffix.removeprefix(".")
    return [f"digits-{app}", f"flower-{app}", app]


@each_dockerfile
def test_copied_files_exist_and_are_sent_to_the_engine(path: Path) -> None:
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = [
        source
        for words in instructions(path)
        if words[0] == "COPY" and not words[1].startswith("--from=")
        for source in words[1:-1]
    ]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(source == entry or source.startswith(f"{entry}/") for entry in sent), f"{source} is ignored"


@each_dockerfile
def test_base_image_is_slim_and_has_a_python_that_the_packages_support(path: Path) -> None:
    bases = {words[1] for words in instructions(path) if words[0] == "FROM"} - stages(path).keys()
    assert len(bases) == 1
    match = re.fullmatch(r"python:(\d+\.\d+)-slim", bases.pop())
    assert match is not None
    for project in ("pyproject.toml", "server/pyproject.toml", "client/pyproject.toml"):
        required: str = tomllib.loads((ROOT / project).read_text())["project"]["requires-python"]
        assert match[1] in SpecifierSet(required), project


@each_dockerfile
def test_images_run_as_a_numbered_user_that_is_not_root(path: Path) -> None:
    # Kubernetes' runAsNonRoot cannot judge a name.
    for target in targets(path):
        user = [words[1] for words in stages(path)[target] if words[0] == "USER"][-1]
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), target


@each_dockerfile
def test_whatever_is_installed_is_pinned(path: Path) -> None:
    installs = [" ".join(words) for words in instructions(path) if words[0] == "RUN" and "install" in words]
    assert len([line for line in installs if "-c constraints.txt" in line]) == 3
    assert all("-c constraints.txt" in line or "--no-deps" in line for line in installs if "pip" in line)


@each_dockerfile
def test_slim_image_is_the_default_and_has_no_torch(path: Path) -> None:
    slim = path.suffix.removeprefix(".")
    assert list(stages(path))[-1] == slim
    origin = {"dependencies"} | {
        words[1].removeprefix("--from=") for words in stages(path)[slim] if words[1].startswith("--from=")
    }
    everything = [words for stage in (slim, *origin) for words in stages(path)[stage]]
    assert not any("torch" in word for words in everything for word in words)


@each_dockerfile
def test_nothing_with_a_compiler_comes_along(path: Path) -> None:
    text = path.read_text()
    assert "apt-get" not in text
    assert "build-essential" not in text


def test_server_listens_where_it_is_exposed_and_checked() -> None:
    text = DOCKERFILES[0].read_text()
    port = re.findall(r"^EXPOSE (\d+)$", text, re.MULTILINE)
    assert len(port) == 1
    assert f"FEDPLAT_LISTEN=0.0.0.0:{port[0]}" in text
    assert f'"127.0.0.1:{port[0]}"' in text
    assert 'exec fedplat-server run \\"$@\\"' in text, "without exec, SIGTERM does not reach the daemon"


@pytest.mark.parametrize("compose", [COMPOSE, FLOWER_COMPOSE], ids=["digits", "flower"])
def test_compose_runs_this_version_of_targets_that_exist(compose: str) -> None:
    known = {target for path in DOCKERFILES for target in targets(path)}
    built = set(re.findall(r"^ +target: (\S+)$", compose, re.MULTILINE))
    images = set(re.findall(r"^ +image: (\S+)$", compose, re.MULTILINE))
    assert built <= known
    assert images == {f"fedplat-{target}:{VERSION}" for target in built}
    for path in re.findall(r"^ +dockerfile: (\S+)$", compose, re.MULTILINE):
        assert (ROOT / path).is_file()


def test_compose_has_ten_clients_with_a_share_and_a_volume_each() -> None:
    for index in range(NUM_CLIENTS):
        service = COMPOSE.partition(f"\n  client-{index}:\n")[2].partition("\n\n")[0]
        assert f'"--index", "{index}"' in service
        assert f'"client-{index}:/var/lib/fedplat"' in service
        assert '"--ticket-file", "/run/fedplat/ticket"' in service
        assert '"ticket:/run/fedplat:ro"' in service
        assert f"\n  client-{index}:" in COMPOSE.partition("\nvolumes:")[2]
    assert f"client-{NUM_CLIENTS}" not in COMPOSE


def test_flower_has_the_services_of_the_other_compose_file() -> None:
    """Apart from the app, its clients and the command that submits it, the two files are the same."""
    parts = re.compile(r"\n  (server|ticket):\n(.*?)(?=\n\n)", re.DOTALL)
    for (name, ours), (_, other) in zip(parts.findall(FLOWER_COMPOSE), parts.findall(COMPOSE), strict=True):
        assert ours.replace("flower-", "digits-").replace("--uses 4", "--uses 10") == other, name
    assert FLOWER_COMPOSE.count('"num-partitions=4"') == 4
    assert "--uses 4 " in FLOWER_COMPOSE


def test_only_the_server_sees_its_data_and_keys() -> None:
    """What acts for the operator mounts the operator's profile, read-only; clients mount the ticket and their own."""
    mounts = dict(re.findall(r"\n  ([\w-]+):\n(?:    .*\n)*?    volumes: \[(.*)\]", COMPOSE))
    assert [name for name, volumes in mounts.items() if '"server:' in volumes] == ["server"]
    assert mounts["ticket"] == '"operator:/var/lib/fedplat-operator:ro", "ticket:/var/lib/fedplat-tickets"'
    assert mounts["submit"] == '"operator:/var/lib/fedplat-operator:ro"'
    assert len(mounts) == NUM_CLIENTS + 3
    made = next(words for words in stages(DOCKERFILES[0])["runtime"] if "useradd" in words)
    for folder in ("/var/lib/fedplat", "/var/lib/fedplat-operator", "/var/lib/fedplat-tickets"):
        assert folder in made, "a volume has the owner and the mode of the folder in the image"


def test_what_acts_for_the_operator_waits_for_the_server() -> None:
    assert "fedplat --timeout 300 enrollment create" in COMPOSE
    assert re.search(r"exec fedplat job submit \S+ --watch --timeout 300 ", COMPOSE)
    assert "until fedplat status" not in COMPOSE, "it says nothing of what comes a second later"


def test_port_is_published_to_this_machine_only() -> None:
    ports = re.findall(r"ports: \[(.*)\]", COMPOSE)
    assert ports == ['"127.0.0.1:7443:7443"']


def test_job_file_asks_for_what_the_images_hold() -> None:
    client = (ROOT / "examples" / "digits" / "client.py").read_text()
    assert JOB.selection.target <= NUM_CLIENTS
    assert f"enrollment create --population {JOB.population} --uses {NUM_CLIENTS}" in COMPOSE
    assert f'@client.trainer("{JOB.trainer}")' in client
    server = stages(DOCKERFILES[0])["digits-server"]
    assert f'"{JOB.evaluation.server}=/app/digits/evaluate.py:evaluate"]' in next(
        words[-1] for words in server if words[0] == "CMD"
    )
    module = JOB.model.initial.partition(":")[0]
    copied = next(words for words in server if words[0] == "COPY" and "docker/job.toml" in words)
    assert any(source.endswith(f"/{module}.py") for source in copied), "the module lies beside the job file"
    assert copied[-1] == "/app/digits/"


def test_submission_is_made_with_a_key_that_the_server_takes() -> None:
    key = re.search(r"--idempotency-key (\S+)", COMPOSE)
    assert key is not None
    assert 8 <= len(key[1]) <= 200


def test_docs_name_this_version() -> None:
    text = (ROOT / "docs" / "docker.md").read_text()
    assert set(re.findall(r"fedplat-(?:server|client):([\w.]+)", text)) == {VERSION}


def test_trainer_of_the_docs_trains_the_job_of_the_docs() -> None:
    text = (ROOT / "docs" / "docker.md").read_text()
    blocks: dict[str, list[str]] = {}
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        blocks.setdefault(language, []).append(block)
    trainer: dict[str, Any] = {}
    model: dict[str, Any] = {}
    exec(blocks["python"][0], trainer)
    exec(blocks["python"][1], model)
    job = parse_job(blocks["toml"][0])
    assert f'"{job.trainer}=trainer:train"' in blocks["dockerfile"][0]
    assert f"enrollment create --population {job.population} --uses 3" in text
    parameters = Parameters.from_arrays(model["initial"]())
    for number in range(job.rounds):
        task = Task(name=job.trainer, parameters=parameters, config=job.config, round=number + 1)
        parameters = trainer["train"](task).parameters
    assert isinstance(parameters, Parameters)
    np.testing.assert_allclose([*parameters["slope"], *parameters["intercept"]], [2.0, 1.0], atol=0.01)
