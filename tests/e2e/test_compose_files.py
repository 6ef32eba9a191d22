"""The compose files agree with the images, the commands and one another; no engine is needed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from fedplat.cli.app import app as operators_app
from fedplat.job import parse_job
from fedplat_client.commands import main as client_command
from fedplat_server.cli.commands import app as server_app
from support.images import DOCKERFILES, FOLDER, ROOT, VERSION, last, load, stages, targets

DIGITS = load(FOLDER / "compose.yaml")
FLOWER = load(FOLDER / "compose.flower.yaml")
SCALE = load(FOLDER / "compose.scale.yaml")
JOB = parse_job((FOLDER / "job.toml").read_text())
NUM_CLIENTS = 10
DAEMONS = ("server-0", "server-1")
PROGRAMS = {
    "fedplat": typer.main.get_command(operators_app),
    "fedplat-server": typer.main.get_command(server_app),
    "fedplat-client": client_command,
}

each_file = pytest.mark.parametrize("compose", [DIGITS, FLOWER, SCALE], ids=["digits", "flower", "scale"])
each_digits = pytest.mark.parametrize("compose", [DIGITS, SCALE], ids=["digits", "scale"])


def text(service: dict[str, Any]) -> str:
    """What a service runs, as a shell reads it: an engine reads $$ as $."""
    words = [*service.get("entrypoint", []), *service.get("command", [])]
    return "\n".join(words).replace("$$", "$")


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """The volumes of a service and how they are mounted."""
    return dict(str(volume).split(":", 1) for volume in service.get("volumes", []))


def built_target(service: dict[str, Any]) -> str | None:
    match = re.fullmatch(rf"fedplat-([\w-]+):{re.escape(VERSION)}", service["image"])
    return match[1] if match is not None else None


def options(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def children(command: click.Group) -> dict[str, click.Command]:
    """The commands of a group, each imported if it is not yet."""
    context = click.Context(command)
    found = {name: command.get_command(context, name) for name in command.list_commands(context)}
    return {name: child for name, child in found.items() if child is not None}


def variables(command: click.Command) -> set[str]:
    """The environment variables of the options of a command and of its subcommands."""
    found: set[str] = set()
    for parameter in command.params:
        names = parameter.envvar or ()
        found.update([names] if isinstance(names, str) else names)
    if isinstance(command, click.Group):
        found.update(name for child in children(command).values() for name in variables(child))
    return found


def check_call(words: list[str]) -> None:
    """Fail unless the command exists and has the options."""
    command = PROGRAMS[words[0]]
    known = options(command)
    for word in words[1:]:
        if word.startswith("--"):
            assert word.partition("=")[0] in known, " ".join(words)
        elif isinstance(command, click.Group) and word in children(command):
            command = children(command)[word]
            known |= options(command)
    assert not isinstance(command, click.Group), f"{' '.join(words)}: no command"


def calls(script: str) -> list[list[str]]:
    """The calls of our programs in a shell script."""
    found: list[list[str]] = []
    for line in re.split(r"[;|&\n{}]+", script):
        words = shlex.split(line, comments=True) if line.count('"') % 2 == 0 and "'" not in line else line.split()
        starts = [number for number, word in enumerate(words) if word in PROGRAMS]
        if starts and len(words) > starts[0] + 1:
            found.append(words[starts[0] :])
    return found


@each_file
def test_images_are_this_version_of_targets_or_pinned(compose: dict[str, Any]) -> None:
    known = {target: path for path in DOCKERFILES for target in targets(path)}
    built: set[str] = set()
    named: set[str] = set()
    for name, service in compose["services"].items():
        target = built_target(service)
        if target is None:
            pinned = r"\$\{[A-Z]+_IMAGE:-[a-z/]+:v?[\d.]+(-[a-z]+)?@sha256:[0-9a-f]{64}\}"
            assert re.fullmatch(pinned, service["image"]), name
            continue
        named.add(target)
        if "build" in service:
            assert service["build"]["target"] == target
            assert ROOT / service["build"]["dockerfile"] == known[target]
            assert (FOLDER / service["build"]["context"]).resolve() == ROOT
            built.add(target)
        else:
            assert service["pull_policy"] == "never", name
    assert built == named
    assert "latest" not in str(compose)


@each_file
def test_options_and_variables_exist(compose: dict[str, Any]) -> None:
    known = {name for program in PROGRAMS.values() for name in variables(program)} | {"FEDPLAT_HOSTS"}
    checked = 0
    for name, service in compose["services"].items():
        assert {key for key in service.get("environment", {}) if key.startswith("FEDPLAT_")} <= known, name
        for words in calls(text(service)):
            check_call(words)
            checked += 1
    assert checked >= 2


@pytest.mark.parametrize("name", DAEMONS)
def test_options_of_daemons_exist(name: str) -> None:
    service = SCALE["services"][name]
    assert 'exec fedplat-server run "$@"' in text(service)
    check_call(["fedplat-server", "run", *service["command"]])


def test_options_of_clients_exist() -> None:
    digits = (ROOT / "examples" / "digits" / "client.py").read_text()
    for compose in (DIGITS, SCALE):
        given = {word for word in compose["services"]["client-0"]["command"] if word.startswith("--")}
        assert given == {"--ticket-file", "--index"}
        assert all(f'"{option}"' in digits for option in given)
    entrypoint = " ".join(last(stages(DOCKERFILES[1])["flower-client"], "ENTRYPOINT")[1:])
    words = re.findall(r'"([^"]+)"', entrypoint)
    check_call([*words, *FLOWER["services"]["client-0"]["command"]])


@each_file
def test_services_are_closed(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] in ("unless-stopped", "no"), name
        assert "privileged" not in service, name
        if name == "secrets":  # it gives files to other users, which only root can do
            assert (service["user"], service["cap_add"], service["network_mode"]) == ("0:0", ["CHOWN"], "none")
        else:
            assert "cap_add" not in service, name
            assert not service.get("user", "10001").startswith("0"), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name


@each_file
def test_volumes_are_declared_and_used(compose: dict[str, Any]) -> None:
    used = {source for service in compose["services"].values() for source in mounts(service)}
    named = {source for source in used if not source.startswith(".")}
    assert named == set(compose["volumes"])
    for source in used - named:
        assert (FOLDER / source).is_file(), source


@each_file
def test_environment_has_no_secrets(compose: dict[str, Any]) -> None:
    """The environment of a container can be read by everyone who may inspect it."""
    for name, service in compose["services"].items():
        for key, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|TOKEN|TICKET|ACCESS_KEY|DATABASE", key):
                assert str(value).startswith(("/run/", "@/run/")), f"{name}: {key}"


@each_digits
def test_there_are_ten_clients_with_a_share_and_a_volume_each(compose: dict[str, Any]) -> None:
    clients = {name: service for name, service in compose["services"].items() if name.startswith("client-")}
    assert list(clients) == [f"client-{index}" for index in range(NUM_CLIENTS)]
    for index, (name, service) in enumerate(clients.items()):
        assert service["command"] == ["--ticket-file", "/run/fedplat/ticket", "--index", str(index)]
        assert mounts(service) == {name: "/var/lib/fedplat", "ticket": "/run/fedplat:ro"}


def test_flower_has_the_services_of_the_other_compose_file() -> None:
    """Apart from the app, its clients and the command that submits it, the two files are the same."""
    for name in ("server", "ticket"):
        ours = str(FLOWER["services"][name])
        assert ours.replace("flower-", "digits-").replace("--uses 4", "--uses 10") == str(DIGITS["services"][name])
    clients = [service for name, service in FLOWER["services"].items() if name.startswith("client-")]
    assert [service["command"][3] for service in clients] == [f"partition-id={index}" for index in range(4)]
    assert all(service["command"][5] == f"num-partitions={len(clients)}" for service in clients)
    assert f"--uses {len(clients)} " in text(FLOWER["services"]["ticket"])


def test_only_the_server_sees_its_data_and_keys() -> None:
    """What acts for the operator mounts the operator's profile, read-only; clients mount the ticket and their own."""
    services = DIGITS["services"]
    assert [name for name, service in services.items() if "server" in mounts(service)] == ["server"]
    for compose in (DIGITS, FLOWER, SCALE):
        assert mounts(compose["services"]["ticket"]) == {
            "operator": "/var/lib/fedplat-operator:ro",
            "ticket": "/var/lib/fedplat-tickets",
        }
        assert mounts(compose["services"]["submit"]) == {"operator": "/var/lib/fedplat-operator:ro"}
    made = next(words for words in stages(DOCKERFILES[0])["runtime"] if "useradd" in words)
    for folder in ("/var/lib/fedplat", "/var/lib/fedplat-operator", "/var/lib/fedplat-tickets"):
        assert folder in made, "a volume has the owner and the mode of the folder in the image"


def test_each_secret_is_seen_by_the_services_that_need_it() -> None:
    seen: dict[str, set[str]] = {}
    for name, service in SCALE["services"].items():
        for source in mounts(service):
            seen.setdefault(source, set()).add(name)
    assert seen["daemon-secrets"] == {"secrets", "init", *DAEMONS}
    assert seen["database-secrets"] == {"secrets", "database"}
    assert seen["s3-secrets"] == {"secrets", "s3"}
    assert seen["tls"] == {"secrets", "init", *DAEMONS}
    assert seen["init"] == {"init"}, "it holds the key of the certificate authority"


def test_only_daemons_and_their_first_start_reach_the_stores() -> None:
    inside = {name for name, service in SCALE["services"].items() if "storage" in service.get("networks", [])}
    assert inside == {"database", "s3", "init", *DAEMONS}
    assert SCALE["networks"]["storage"] == {"internal": True}
    for name in ("database", "s3", "init"):
        assert SCALE["services"][name]["networks"] == ["storage"]


def test_daemons_differ_only_in_their_names() -> None:
    first, second = (SCALE["services"][name] for name in DAEMONS)
    assert second["networks"]["default"]["aliases"] == ["server"]
    assert mounts(first).keys() ^ mounts(second).keys() == set(DAEMONS)
    for key in ("entrypoint", "environment", "networks", "image", "depends_on"):
        assert first[key] == second[key]
    assert [word.replace("server-0", "server-1") for word in first["command"]] == second["command"]
    for index, service in enumerate((first, second)):
        assert f"--advertise=server-{index}:7443" in service["command"]
        assert f"server-{index}" in mounts(service)
    assert "--host server --host server-0 --host server-1" in text(SCALE["services"]["init"])


def test_prometheus_asks_each_daemon_and_has_the_rules_of_the_package() -> None:
    configuration = load(FOLDER / "prometheus.yml")
    [scrape] = configuration["scrape_configs"]
    [static] = scrape["static_configs"]
    assert static["targets"] == [f"{name}:9464" for name in DAEMONS]
    assert all("--metrics=0.0.0.0:9464" in SCALE["services"][name]["command"] for name in DAEMONS)
    inside = mounts(SCALE["services"]["prometheus"])
    assert inside["./prometheus.yml"] == "/etc/prometheus/prometheus.yml:ro"
    rules = "../server/fedplat_server/metrics/grafana/fedplat.rules.yml"
    assert inside[rules] == f"/etc/prometheus/{configuration['rule_files'][0]}:ro"


@each_digits
def test_what_acts_for_the_operator_waits_for_the_server(compose: dict[str, Any]) -> None:
    assert "fedplat --timeout 300 enrollment create" in text(compose["services"]["ticket"])
    submission = text(compose["services"]["submit"])
    assert re.search(r"exec fedplat job submit \S+ --follow --timeout 300 ", submission)
    assert "until fedplat status" not in submission, "it says nothing of what comes a second later"


@each_digits
def test_job_file_asks_for_what_the_images_hold(compose: dict[str, Any]) -> None:
    client = (ROOT / "examples" / "digits" / "client.py").read_text()
    assert JOB.selection.target <= NUM_CLIENTS
    create = f"enrollment create --population {JOB.population} --uses {NUM_CLIENTS}"
    assert create in text(compose["services"]["ticket"])
    assert f'@client.trainer("{JOB.trainer}")' in client
    evaluator = f"{JOB.evaluation.server}=/app/digits/evaluate.py:evaluate"
    server = stages(DOCKERFILES[0])["digits-server"]
    assert f'"{evaluator}"]' in last(server, "CMD")[-1]
    assert all(f"--evaluator={evaluator}" in SCALE["services"][name]["command"] for name in DAEMONS)
    module = JOB.model.initial.partition(":")[0]
    copied = next(words for words in server if words[0] == "COPY" and "docker/job.toml" in words)
    assert any(source.endswith(f"/{module}.py") for source in copied), "the module lies beside the job file"
    assert copied[-1] == "/app/digits/"


def test_submissions_have_keys_that_the_server_takes() -> None:
    keys = [
        re.findall(r"--idempotency-key (\S+)", text(compose["services"]["submit"]))
        for compose in (DIGITS, FLOWER, SCALE)
    ]
    assert all(len(found) == 1 and 8 <= len(found[0]) <= 200 for found in keys)
    assert len({found[0] for found in keys}) == 3


def test_paths_of_scripts_exist() -> None:
    assert (FOLDER / "services" / "postgres.sh").is_file()
    for script in ("build.sh", "run.sh"):
        assert (FOLDER / script).stat().st_mode & 0o111, f"{script} is not executable"
        assert Path(FOLDER / script).read_text().startswith("#!/usr/bin/env bash\n")
