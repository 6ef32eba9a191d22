from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

import fedplat
from fedplat.cli import formats, jobs
from fedplat.job import digest_job, parse_job
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2, model_pb2
from support.cli.commands import Run, parsed
from support.cli.fake_admin import FakeServer
from support.cli.fake_state import T0, S, State
from support.cli.story import ending, script

MODEL = Parameters.from_arrays({"w": np.ones(2, np.float32)})
JOB = """
name = "digits"
population = "demo"
trainer = "digits"
rounds = 3
[model]
initial = "model.safetensors"
[selection]
goal = 8
[updates]
max_norm = 100.0
"""


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    (tmp_path / "model.safetensors").write_bytes(MODEL.to_bytes())
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return str(path)


@pytest.fixture
def job(state: State) -> admin_pb2.Job:
    """A running job with two versions and three attempts."""
    running = state.add_job()
    state.add_version(b"first", 0)
    running.model.CopyFrom(state.add_version(b"second" * 1000, 1).model)
    abandoned, committed, open_attempt = (
        admin_pb2.Round(round=number, attempt=attempt, kind=admin_pb2.ATTEMPT_KIND_TRAIN, phase=phase, goal=8)
        for number, attempt, phase in (
            (1, 1, admin_pb2.ATTEMPT_PHASE_ABANDONED),
            (1, 2, admin_pb2.ATTEMPT_PHASE_COMMITTED),
            (2, 1, admin_pb2.ATTEMPT_PHASE_COLLECTING),
        )
    )
    abandoned.reason = "too few clients came"
    committed.assigned, committed.reported, committed.late, committed.failed, committed.seconds = 11, 8, 2, 1, 3.21
    committed.update_bytes = 8 * 1536
    committed.mean_staleness, committed.max_staleness = 1.25, 3
    committed.client_metrics["loss"] = 0.31214
    committed.server_metrics["accuracy"] = 0.912
    open_attempt.assigned = 11
    state.rounds = [abandoned, committed, open_attempt]
    running.current.CopyFrom(open_attempt)
    return running


def test_status(run: Run, server: FakeServer):
    result = run("status")
    assert result.exit_code == 0
    assert result.stdout == (
        f"server       {server.address}\n"
        f"connection   TLS, the server's certificate expires in 30 days ({formats.moment(T0)})\n"
        "version      0.1.0 (protocol 1)\n"
        "role         leader, the only daemon of its database\n"
        "process      4711\n"
        "running for  1 h 2 min\n"
        "peak memory  200.0 MiB\n"
        "clients      12 enrolled, 9 waiting, 3 busy\n"
        "jobs         1 DRAFT, 2 RUNNING\n"
        "evaluators   digits\n"
        "trainers     none\n"
        "plugins      none\n"
        "database     sqlite\n"
        "disk         2.0 GiB of 8.0 GiB free\n"
        "alerts       2\n"
        "critical: Job digits waits. Start clients.\n"
        "warning: The disk is small. Enlarge it.\n"
    )
    server.state.leader = {"leader": "d-1", "leader_address": "one:7443", "term": 3}
    assert "role         leader, d-1 at one:7443, term 3\n" in run("status").stdout
    server.state.leader["gateway"] = "d-2"
    assert "role         gateway d-2; the leader is d-1 at one:7443, term 3\n" in run("status").stdout
    assert parsed(run("status", "--json"))["num_jobs"] == {"DRAFT": 1, "RUNNING": 2}


def test_job_list(run: Run, state: State):
    empty = run("job", "list")
    assert (empty.exit_code, empty.stdout) == (0, "")
    assert empty.stderr == "no jobs yet; submit one with: fedplat job submit FILE\n"
    assert parsed(run("job", "list", "--json")) == []
    jobs = [state.add_job("digits"), state.add_job("[red]x\x1b[2J", S.JOB_STATUS_FAILED)]
    header, *rows = run("job", "list").stdout.splitlines()
    assert header.split() == ["JOB", "NAME", "STATUS", "ROUND", "REASON"]
    assert rows[0].split()[:3] == [jobs[1].job_id, "[red]x\\x1b[2J", "FAILED"]
    assert rows[1].split()[:4] == [jobs[0].job_id, "digits", "RUNNING", "1/3"]
    wide = run("job", "list", "-o", "wide").stdout.splitlines()
    assert wide[0].split() == ["JOB", "NAME", "POPULATION", "STATUS", "ROUND", "VERSION", "CREATED", "REASON"]
    assert wide[2].split()[:4] == [jobs[0].job_id, "digits", "demo", "RUNNING"]
    listed = parsed(run("job", "list", "--json"))
    assert [entry["name"] for entry in listed] == ["digits", "[red]x\x1b[2J"]
    assert listed[0]["status"] == "RUNNING"
    assert listed[0]["created_unix_s"] == T0
    assert listed[0]["current"] is None


def test_job_show_includes_the_compression_of_updates(run: Run, job: admin_pb2.Job):
    job.job_file = JOB
    assert "updates     not compressed\n" in run("job", "show", "digits").stdout
    job.job_file = f"{JOB}[compression]\nuplink = {{codec = 'bf16'}}\n"
    job.current.reported, job.current.update_bytes = 2, 3000
    text = run("job", "show", "digits").stdout
    assert 'updates     compressed with {"codec":"bf16","zstd":false}\n' in text
    assert "0 rejected, 2.9 KiB received (1.5 KiB per update)\n" in text
    job.current.mean_staleness, job.current.max_staleness = 0.5, 2
    text = run("job", "show", "digits").stdout
    assert "(1.5 KiB per update), 0.5 versions behind on average and 2 at most\n" in text


def test_job_show(run: Run, job: admin_pb2.Job):
    text = run("job", "show", "digits").stdout
    assert f"job         {job.job_id}\n" in text
    assert "status      RUNNING\n" in text
    assert "rounds      1 of 3 committed\n" in text
    assert f"model       version 1, 5.9 KiB, sha256 {job.model.digest}\n" in text
    assert "attempt     round 2 attempt 1 collecting: 11 assigned, 0 of 8 reported, 0 late, 0 failed" in text
    assert "updates     -\n" in text  # a job file that this version cannot read
    shown = parsed(run("job", "show", job.job_id, "--json"))
    assert shown["current"]["phase"] == "COLLECTING"
    assert shown["model"] == {"version": 1, "digest": job.model.digest, "size_bytes": 6000}


@pytest.mark.usefixtures("job")
def test_job_rounds(run: Run):
    header, *rows = run("job", "rounds", "digits").stdout.splitlines()
    assert header.split() == ["ROUND", "TRY", "PHASE", "ASSIGNED", "REPORTED", "LOST", "TIME", "METRICS"]
    assert [" ".join(row.split()) for row in rows] == [
        "1 2 committed 11 8 3 3.2 s server: accuracy 0.912; clients: loss 0.3121",
        "2 1 collecting 11 0 0 -",
    ]
    wide = run("job", "rounds", "digits", "--output", "WIDE").stdout.splitlines()
    assert [" ".join(row.split()) for row in wide[1:]] == [
        "1 2 train committed - 0 0 11 8 3 2 1 0 0 0 0 12.0 KiB 1.2 (max 3) - 3.2 s "
        "server: accuracy 0.912; clients: loss 0.3121",
        "2 1 train collecting - 0 0 11 0 0 0 0 0 0 0 0 - - - -",
    ]
    assert "too few clients came" in run("job", "rounds", "digits", "--all").stdout
    assert [entry["attempt"] for entry in parsed(run("job", "rounds", "digits", "--json", "--all"))] == [1, 2, 1]


def test_client_list(run: Run, state: State):
    assert run("client", "list").stderr == "no clients are enrolled\n"
    assert run("client", "list", "--population", "p").stderr == "no clients are enrolled in p\n"
    state.clients = [
        admin_pb2.Client(
            client_id="c1",
            population="demo",
            labels={"b": "2", "a": "x y"},
            state="busy",
            job_id="j",
            enrollment_id="e",
        ),
        admin_pb2.Client(client_id="c2", population="other", state="away", software_version="0.1.0"),
    ]
    rows = run("client", "list").stdout.splitlines()[1:]
    assert [" ".join(row.split()) for row in rows] == ["c1 demo busy - a=x y b=2", "c2 other away -"]
    wide = run("client", "list", "-o", "wide").stdout.splitlines()[1:]
    assert [" ".join(row.split()) for row in wide] == [
        "c1 demo busy j - - e - - a=x y b=2",
        "c2 other away - - - - 0.1.0 -",
    ]
    only = parsed(run("client", "list", "--population", "other", "--json"))
    assert [client["client_id"] for client in only] == ["c2"]


def test_job_control(run: Run, job: admin_pb2.Job):
    assert run("job", "pause", "digits").stdout == f"job digits ({job.job_id}) is PAUSED\n"
    assert parsed(run("job", "resume", "digits", "--json"))["status"] == "RUNNING"
    refused = run("job", "start", "digits")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr == "error: job 'digits' is RUNNING; expected DRAFT\n"
    assert parsed(run("job", "cancel", job.job_id, "--json"))["status"] == "CANCELLED"


def test_job_delete(run: Run, job: admin_pb2.Job, state: State):
    assert "there is no terminal to confirm it: add --yes" in run("job", "delete", "digits").stderr
    assert run("job", "delete", "digits", "--yes").stderr == "error: cannot delete a job that is RUNNING\n"
    job.status, state.num_releases = S.JOB_STATUS_COMPLETED, 2
    said = run("job", "delete", "digits", "--yes").stdout
    assert (said.splitlines()[-1], state.jobs) == ("2 private releases of it stay in the ledger of population demo", {})


def test_job_set(run: Run, job: admin_pb2.Job, state: State):
    done = run("job", "set", "digits", "retention.versions=5", "retry.pause_after=0")
    assert done.stdout == f"job digits ({job.job_id}) is RUNNING\n"
    assert done.stderr == "set retention.versions=5, retry.pause_after=0\n"
    assert state.changes == ["retention.versions=5", "retry.pause_after=0"]
    assert run("job", "set", "digits").exit_code == 2


def test_a_job_whose_versions_fill_a_disk_is_warned_of(run: Run, job_file: str, monkeypatch: pytest.MonkeyPatch):
    assert "retention.versions" not in run("job", "check", job_file).stderr
    monkeypatch.setattr(jobs, "LARGE_BYTES", 100)
    warned = " ".join(run("job", "check", job_file).stderr.split())
    assert "retention.versions = 0: the 3 versions of the model need" in warned


def test_job_rollback(run: Run, job: admin_pb2.Job):
    result = run("job", "rollback", "digits", "0")
    assert result.stdout == (
        f"job digits ({job.job_id}) is RUNNING\n"
        "version 2 has the bytes of version 0; the aggregation rule starts without state: that of the version is not "
        "kept (retention.states)\n"
    )
    assert "(restored from version 0)" in run("job", "show", "digits").stdout
    again = parsed(run("job", "rollback", "digits", "1", "--json"))
    assert (again["rule_state"], again["job"]["restored_from"]) == ("initial", 1)
    wrong = run("job", "rollback", "digits", "last")
    assert wrong.exit_code == 2


def test_job_submit(run: Run, state: State, job_file: str):
    result = run("job", "submit", job_file)
    (job,) = state.jobs.values()
    assert result.exit_code == 0
    assert result.stdout == f"job digits ({job.job_id}) is RUNNING\n"
    assert result.stderr == f"watch it with: fedplat job watch {job.job_id}\n"
    assert job.job_file == JOB
    assert state.models[job.model.digest] == MODEL.to_bytes()


def test_a_clone_has_the_file_and_the_first_model_of_its_job(run: Run, state: State, job_file: str):
    submitted = parsed(run("job", "submit", job_file, "--json"))
    digest = submitted["model"]["digest"]
    model = model_pb2.ModelRef(version=0, digest=digest, size_bytes=len(state.models[digest]))
    state.versions = [admin_pb2.ModelVersion(model=model)]
    cloned = parsed(run("job", "clone", submitted["job_id"], "--no-start", "--idempotency-key", "k", "--json"))
    job = state.jobs[cloned["job_id"]]
    assert (job.job_file, job.model.digest, job.status) == (JOB, digest, S.JOB_STATUS_DRAFT)
    assert cloned["job_id"] != submitted["job_id"]
    assert parsed(run("job", "clone", submitted["job_id"], "--idempotency-key", "k", "--json"))["job_id"] == job.job_id
    assert job.status == S.JOB_STATUS_RUNNING
    state.versions = []
    gone = run("job", "clone", job.job_id)
    assert (gone.exit_code, gone.stderr) == (1, "error: the job has no version 0\n")


def test_job_submit_as_a_draft(run: Run, state: State, job_file: str):
    draft = parsed(run("job", "submit", job_file, "--no-start", "--json"))
    assert (draft["status"], draft["num_rounds"]) == ("DRAFT", 3)
    assert len(state.jobs) == 1


def test_job_submit_twice_with_one_key_gives_one_job(run: Run, state: State, job_file: str):
    first = parsed(run("job", "submit", job_file, "--idempotency-key", "k", "--json"))
    again = parsed(run("job", "submit", job_file, "--idempotency-key", "k", "--json"))
    assert again == first
    assert first["status"] == "RUNNING"
    other = parsed(run("job", "submit", job_file, "--json"))
    assert other["job_id"] != first["job_id"]
    assert len(state.by_key) == 2


def test_job_submit_that_cannot_start_says_where_the_draft_is(run: Run, state: State, job_file: str):
    state.refuses_start = True
    result = run("job", "submit", job_file)
    (job,) = state.jobs.values()
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"error: not today\nthe job exists and is a draft; start it with: fedplat job start {job.job_id}\n"
    )


def test_job_submit_and_watch(run: Run, state: State, job_file: str):
    state.add_events(*script(), ending())
    state.ends_started_jobs = True
    result = run("job", "submit", job_file, "--follow")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].endswith("is RUNNING")
    assert lines[1].startswith("round 1/3  abandoned")  # the status is printed once
    assert lines[-1].endswith("is COMPLETED")
    assert result.stderr == ""


def test_job_watch_as_json_prints_each_event(run: Run, state: State, job: admin_pb2.Job):
    state.add_events(*script(), ending())
    result = run("job", "watch", job.job_id, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [event["sequence"] for event in events] == [10 * (i + 1) for i in range(len(state.events))]
    assert [event["metrics"] for event in events if event["metrics"]] == [
        {"loss": 0.5},
        {"accuracy": 0.75},
        {"accuracy": 0.7},
    ]


@pytest.mark.parametrize(("status", "code"), [("COMPLETED", 0), ("FAILED", 1), ("CANCELLED", 1)])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_job_watch_exits_as_the_job_ended(
    status: str, code: int, form: tuple[str, ...], run: Run, state: State, job: admin_pb2.Job
):
    state.add_events(*script(), ending(status, "so it is"))
    result = run("job", "watch", job.job_id, *form)
    assert result.exit_code == code
    if not form:
        assert result.stdout.endswith(f"job digits ({job.job_id}) is {status}: so it is\n")


def test_job_check_needs_no_server(run: Run, job_file: str):
    result = run("--server", "nobody.invalid:1", "job", "check", job_file)
    assert result.exit_code == 0
    digest = digest_job(parse_job(Path(job_file).read_text()), hashlib.sha256(MODEL.to_bytes()).hexdigest())
    assert result.stdout == (
        f"{job_file} is a valid job: digits, 3 rounds for population demo, 11 clients assigned and 8 reports needed "
        f"in each; its model has 1 tensor ({len(MODEL.to_bytes())} B)\n"
        f"digest of the file and the model: {digest}\n"
    )
    record = parsed(run("job", "check", job_file, "--json"))
    assert record["valid"] is True
    assert record["num_tensors"] == 1
    assert record["warnings"] == []
    assert record["digest"] == digest


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ('kind = "gossip"\nexchange = "ring"', "4 to 8 silos in each; "),
        ('kind = "buffered"\nconcurrency = 20', "20 clients at work and 8 reports needed in each; "),
    ],
)
def test_job_check_speaks_of_the_jobs_mode(mode: str, words: str, run: Run, job_file: str):
    path = Path(job_file)
    more = "min_fraction = 0.5" if "gossip" in mode else ""
    changed = JOB.replace("max_norm = 100.0", "").replace("goal = 8", f"goal = 8\n{more}")
    path.write_text(f"{changed}\n[mode]\n{mode}\n")
    result = run("job", "check", job_file)
    assert words in result.stdout, result.output
    assert ("warning: " in result.stderr) == ("buffered" in mode)


@pytest.mark.parametrize(
    ("updates", "words"),
    [
        ("", ["nothing bounds the norm of a single update, which may be 1000 times the median"]),
        ("outlier_factor = 0", ["and updates.outlier_factor = 0 keeps outliers too"]),
        (
            "max_norm = 1\nmax_weight_factor = 0",
            ["a client that claims updates.max_examples = 1e+06 examples may outweigh"],
        ),
        ("clip_norm = 1", []),
        ("max_norm = 1", []),
        ('weighting = "uniform"\n[robust]\nbyzantine = 1\nrule = {name = "median"}', []),
    ],
)
def test_job_check_and_submit_warn_of_what_one_client_could_do(updates: str, words: list[str], run: Run, job_file: str):
    path = Path(job_file)
    path.write_text(JOB.replace("max_norm = 100.0", updates))
    checked, submitted = run("job", "check", job_file), run("job", "submit", job_file)
    found = parsed(run("job", "check", job_file, "--json"))["warnings"]
    assert len(found) == len(words)
    for warning, expected in zip(found, words, strict=True):
        assert expected in warning
        assert f"warning: {warning}\n" in checked.stderr
        assert f"warning: {warning}\n" in submitted.stderr


@pytest.mark.parametrize("command", ["check", "submit"])
def test_a_wrong_job_file_has_a_line_for_each_mistake(command: str, run: Run, state: State, tmp_path: Path):
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace("goal = 8", "goall = 8").replace("rounds = 3", "rounds = -3"))
    result = run("job", command, str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        f"error: {path}: rounds = -3: expected a whole number >= 1",
        f"error: {path}: selection.goall = 8: there is no such key; did you mean goal?",
        f"error: {path}: selection.goal: this key is required and missing",
    ]
    assert state.jobs == {}


@pytest.mark.parametrize("command", ["check", "submit"])
def test_a_job_file_without_its_model(command: str, run: Run, tmp_path: Path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    result = run("job", command, str(path))
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: {path}: model.initial = 'model.safetensors': {tmp_path}/model.safetensors cannot be read: "
        "No such file or directory\n"
    )


def test_job_check_as_json_lists_the_mistakes(run: Run, tmp_path: Path):
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xff\xfe")
    result = run("job", "check", str(path), "--json")
    assert result.exit_code == 2
    record = json.loads(result.stdout)
    assert record["valid"] is False
    assert len(record["mistakes"]) == 1
    assert "cannot be read" in record["mistakes"][0]


COMMANDS = [
    ("status",),
    ("job", "list"),
    ("job", "show", "x"),
    ("job", "rounds", "x"),
    ("job", "start", "x"),
    ("job", "watch", "x"),
    ("job", "pause", "x"),
    ("job", "resume", "x"),
    ("job", "cancel", "x"),
    ("job", "rollback", "x", "1"),
    ("job", "set", "x", "retention.versions=5"),
    ("client", "list"),
    ("model", "list", "x"),
    ("model", "export", "x", "--to", "never-written"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_without_a_server_each_command_prints_one_line(command: tuple[str, ...], run: Run, closed_port: str):
    result = run("--timeout", "0", *command, "--server", closed_port)
    assert (result.exit_code, result.stdout) == (5, "")
    assert result.stderr == (
        f"error: no fedplat server answers at {closed_port} (Connection refused); "
        "check that it is running (fedplat-server run)\n"
    )


def test_submit_without_a_server(run: Run, job_file: str, closed_port: str):
    result = run("--server", closed_port, "job", "submit", job_file, "--timeout", "0.5")
    assert result.exit_code == 5
    waits, error, note = result.stderr.splitlines()
    assert waits == f"waiting for {closed_port}: Connection refused; trying for 0.5 s"
    assert error.startswith(f"error: no fedplat server answers at {closed_port} (Connection refused); ")
    assert error.endswith("; gave up after 0.5 s")
    assert re.fullmatch(
        r"if the job was created nevertheless, submit again with --idempotency-key [0-9a-f]{32} to get it", note
    )


@pytest.mark.parametrize("command", [command for command in COMMANDS if "x" in command], ids=" ".join)
def test_an_unknown_job_is_refused(command: tuple[str, ...], run: Run):
    result = run(*command)
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "error: there is no job 'x'\n")


def test_global_options_stand_before_or_after(run: Run, server: FakeServer, closed_port: str):
    before = run("--server", server.address, "--json", "status")
    assert parsed(run("status", "--json", "--server", server.address)) == parsed(before)
    assert run("--server", closed_port, "status", "--server", server.address).exit_code == 0
    assert run("--server", closed_port, "status").exit_code == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("jbo",), "No such command 'jbo'. Did you mean 'job'?"),
        (("job", "lst"), "Did you mean 'list'"),
        (("job", "show"), "Missing argument 'JOB'"),
        (("job", "show", "a", "b"), "unexpected extra argument"),
        (("job", "list", "--jason"), "No such option"),
        (("job", "submit"), "Missing argument 'FILE'"),
        (("model", "export", "j"), "Missing option '--to'"),
        (("model", "export", "j", "--to", "f", "--model-version", "x"), "Invalid value for '--model-version'"),
        (("model", "export", "j", "--to", "f", "--model-version", "-1"), "Invalid value for '--model-version'"),
        (("status", "--server", "nowhere"), "expected host:port"),
        (("--server", "1:2:3", "status"), "expected host:port"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], message: str, run: Run):
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_version_and_help(run: Run):
    assert run("--version").stdout == f"fedplat {fedplat.__version__}\n"
    assert "--server and --json may be given before or after the command" in run("-h").stdout
    for group in ("job", "client", "model"):
        assert run(group, "--help").exit_code == 0
    assert "\\[" not in run("dashboard", "--help").stdout, "an escape for Rich, whose markup is off"
