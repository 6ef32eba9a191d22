"""Flower apps in virtual time: `fedplat flower run`, and `run_app` from Python."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from fedplat.cli.app import app as cli
from fedplat.errors import EngineError, JobFileError
from fedplat.model import Parameters
from fedplat.simulation import simulate
from fedplat.simulation.flower import AppOptions, MessageSetResult, run_app
from support.cli.runner import CliRunner
from support.simulation import flower_apps
from support.simulation.flower_apps import write_app

pytest.importorskip("flwr")
ROOT = Path(__file__).resolve().parents[3]
DIGITS = ROOT / "examples/flower/digits"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, ["flower", "run", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def compute_reference(folder: Path, num_clients: int, seed: int) -> Parameters:
    """Return the final model of a plain loop over an app's two halves, without the coordinator."""
    from fedplat import randomness
    from fedplat.flower import identity
    from fedplat.flower.app import read_app
    from fedplat.flower.apps import ClientAppRunner, ServerAppRun
    from fedplat.flower.grid import NodeReply
    from fedplat.simulation.federated.training import training_seed

    app = read_app(folder)
    client, server = ClientAppRunner(app), ServerAppRun(app, lambda: range(num_clients))
    randomness.seed_generators(seed)
    states: dict[int, Parameters] = {}
    counts: dict[int, int] = {}
    sent = server.advance()
    while sent is not None:
        own, replies = randomness.get_states(), list[NodeReply]()
        for node in sent.nodes:
            counts[node] = counts.get(node, 0) + 1
            randomness.seed_generators(training_seed(seed, node, counts[node]))
            config = {"partition-id": node, "num-partitions": num_clients}
            answer = client.answer(sent.file.to_parameters(), node, config, state=states.get(node))
            states[node] = answer.state
            replies.append(NodeReply.read(node, answer.reply.to_parameters()))
        randomness.set_states(own)
        identity.assume(1)
        sent = server.advance(replies)
    model = server.final_model
    assert model is not None
    return model


def test_a_run_from_the_command_line(here: Path) -> None:
    write_app(here / "app")
    done = run("app", "--workers", "1")
    assert done.exit_code == 0, done.output
    fields = {line[:14].strip(): line[14:].strip() for line in done.stdout.splitlines()}
    assert fields["status"] == "COMPLETED"
    assert fields["replies"] == "14 of 14"  # of 6 clients, 4 train and 3 evaluate in each of 2 rounds
    assert fields["final model"].startswith("runs/small/model.safetensors")
    lines = [line for line in done.stderr.splitlines() if line != "the app prints"]
    assert lines[0] == "small: 6 clients, seed 0; runs/small"
    assert lines[1] == "server-round 1   train     4 of 4 replies  seen 0"
    shown = [tuple(line.split()[:3]) for line in lines[1:]]
    assert shown == [("server-round", number, kind) for number in "12" for kind in ("train", "evaluate")]
    assert "INFO" not in done.output
    again = run("app", "--workers", "1", "--json", "--run-config", "num-rounds=1", "--num-clients", "5", "--seed", "7")
    assert again.exit_code == 0, again.output
    found: dict[str, Any] = json.loads(again.stdout)
    assert (found["num_clients"], found["seed"], found["totals"]["rounds"]) == (5, 7, 2)
    assert found["metrics"]["server-round"] == 1.0
    assert found["output"] == "runs/small-2"
    taken = run("app", "--dir", "runs/small")
    assert taken.exit_code == 2
    assert taken.stderr.splitlines()[-1] == ("error: runs/small has a run already; choose another folder (--dir)")


def test_the_final_bytes_depend_on_the_seed_only(here: Path) -> None:
    folder = write_app(here / "app")
    one, two, three = (run_app(folder, AppOptions(seed=3, workers=workers)).model for workers in (1, 2, 3))
    assert one is not None
    assert one == two == three == compute_reference(folder, 6, 3)
    assert run_app(folder, AppOptions(seed=4, workers=1)).model != one


@pytest.mark.slow
def test_the_example_has_the_model_of_a_plain_loop(here: Path) -> None:
    done = run(str(DIGITS), "--workers", "2")
    assert done.exit_code == 0, done.output
    expected = compute_reference(DIGITS, 10, 0)
    assert (here / "runs/digits/model.safetensors").read_bytes() == expected.to_bytes()


def test_a_loop_of_the_apps_own(here: Path) -> None:
    folder = write_app(here / "app", flower_apps.OWN_LOOP, flower_apps.OWN_LOOP_CLIENT)
    sets: list[MessageSetResult] = []
    done = run_app(folder, AppOptions(workers=1), on_messages=sets.append)
    assert done.model is None
    assert [each.message_type for each in sets] == ["query.sum", "query.sum"]
    assert (here / "sums.txt").read_text() == "36 0"  # twice 0 + 1 + ... + 5, and 6 times the number of the round


def test_an_app_of_the_old_api(here: Path) -> None:
    sets: list[MessageSetResult] = []
    folder = write_app(here / "app", flower_apps.LEGACY_SERVER, flower_apps.LEGACY_CLIENT)
    run_app(folder, AppOptions(workers=1), on_messages=sets.append)
    # Each of its threads sends one message, so on a busy machine several sets have those of a round.
    replies = {
        kind: [each.num_replies for each in group]
        for kind, group in itertools.groupby(sets, key=lambda each: each.message_type)
    }
    types = [kind for kind, _ in itertools.groupby(each.message_type for each in sets)]
    assert types == ["get_parameters", "train", "evaluate", "train", "evaluate"]
    assert {kind: sum(counts) for kind, counts in replies.items()} == {"get_parameters": 1, "train": 6, "evaluate": 6}
    assert sets[-1].metrics["loss"] == pytest.approx(2.0)  # each of two rounds adds 1 to the parameters


def test_failed_and_late_clients_are_error_replies(here: Path) -> None:
    fleet = "[deadlines]\nselection_s = 60\n[simulation]\nseed = 2\n[simulation.fleet]\nfails = 0.2\nvanishes = 0.2\n"
    folder = write_app(here / "app", flower_apps.OWN_LOOP, flower_apps.OWN_LOOP_CLIENT, fedplat=fleet)
    sets: list[MessageSetResult] = []
    run_app(folder, AppOptions(("num-rounds=5",), workers=1), on_messages=sets.append)
    errors = int((here / "sums.txt").read_text().split()[1])
    assert 0 < errors < 30
    merged = [each for each in sets if not each.problem]  # without abandoned attempts
    assert [each.round for each in merged] == [1, 2, 3, 4, 5]
    assert errors == sum(each.num_messages - each.num_replies for each in merged)
    assert sum(each.num_failed for each in sets) > 0


def test_an_app_that_waits_gets_failures_but_no_late_replies(here: Path) -> None:
    loop = r"ids = grid.push_messages\((.*)\)\n +while ids:\n(?: {12}.*\n)+"
    waiting = re.sub(loop, r"replies += grid.send_and_receive(\1)\n", flower_apps.OWN_LOOP)
    assert "send_and_receive" in waiting
    fleet = "[selection]\nover_selection = 2.0\n[simulation]\nseed = 2\n[simulation.fleet]\nnoise = 1.0\nfails = 0.3\n"
    folder = write_app(here / "app", waiting, flower_apps.OWN_LOOP_CLIENT, fedplat=fleet)
    sets: list[MessageSetResult] = []
    run_app(folder, AppOptions(("num-rounds=5",), workers=1), on_messages=sets.append)
    errors = int((here / "sums.txt").read_text().split()[1])
    merged = [each for each in sets if not each.problem]
    assert errors == sum(each.num_failed for each in merged) > 0
    assert errors < sum(each.num_messages - each.num_replies for each in merged)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_state_counts_only_if_the_reply_was_merged(here: Path, workers: int) -> None:
    """With over-selection the fastest clients' replies are merged; the others' states are those of before."""
    options = "[selection]\nover_selection = 2.0\n[simulation.fleet]\nnoise = 1.0\n"
    folder = write_app(here / "app", flower_apps.OWN_LOOP, flower_apps.OWN_LOOP_CLIENT, fedplat=options)
    done = run_app(folder, AppOptions(("num-rounds=6",), workers=workers))
    seen: dict[str, list[int]] = json.loads((here / "seen.json").read_text())
    assert sum(map(len, seen.values())) == 6 * 3
    assert all(calls == list(range(len(calls))) for calls in seen.values())
    merged = done.result.participation.merged
    assert [len(seen.get(str(client), [])) for client in range(6)] == merged.tolist()
    assert merged.min() < merged.max()


def test_only_clients_whose_labels_match_are_drawn(here: Path) -> None:
    options = "[selection]\nwhere = \"region == 'eu'\"\n[simulation.fleet.labels.region]\neu = 0.5\nus = 0.5\n"
    folder = write_app(here / "app", flower_apps.OWN_LOOP, flower_apps.OWN_LOOP_CLIENT, fedplat=options)
    done = run_app(folder, AppOptions(num_clients=20, workers=1))
    share = {group.name: group.share_of_assigned for group in done.result.groups}
    assert share == {"region=eu": 1.0, "region=us": 0.0}


def test_one_failed_client_does_not_end_a_round(here: Path) -> None:
    write_app(here / "app")
    done = run("app", "--workers", "2", "--run-config", "fail=2")
    assert done.exit_code == 0, done.output
    assert "client 2: the ClientApp of small, called with train, raised ValueError: no data here" in done.stderr
    assert "3 of 4 replies, 1 failed" in done.stderr


def test_a_client_whose_reply_does_not_fit_is_rejected_by_name(here: Path) -> None:
    write_app(here / "app")
    done = run("app", "--workers", "1", "--run-config", "mode=one-shape")
    assert done.exit_code == 0, done.output
    assert "client 2: its shapes or kinds of arrays are not those of most replies" in done.stderr
    assert "3 of 4 replies, 1 failed" in done.stderr


def test_warnings_of_flower_reach_the_user(
    here: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("flwr")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    server = flower_apps.SERVER.replace("FedAvg(", "Bulyan(num_malicious_nodes=3, ").replace("FedAvg", "Bulyan")
    write_app(here / "app", server)
    done = run("app", "--workers", "1")
    assert [record.getMessage()[:60] for record in caplog.records][:2] == [
        "Insufficient replies, skipping Bulyan aggregation: Required at least 15"[:60],
        "Round 1: the strategy Bulyan has aggregated none of 4 replies; the model stays as it was."[:60],
    ]
    assert done.exit_code == 2
    assert "the strategy Bulyan has aggregated no reply in 2 rounds" in done.stderr.splitlines()[-1]


BAD_CONFIGS = {
    "mode=not-finite": "arrays that are not finite",
    "mode=text": "answered train with a str; expected a Message",
    "mode=no-examples": "Missing required key `num-examples`",
    "fail": "'fail': expected KEY=VALUE",
    "lr=1": "small has no key 'lr' in [tool.flwr.app.config]",
}


@pytest.mark.parametrize("change", BAD_CONFIGS)
def test_a_bad_reply_is_one_line(here: Path, change: str) -> None:
    write_app(here / "app")
    done = run("app", "--workers", "1", "--run-config", change)
    assert done.exit_code != 0
    assert BAD_CONFIGS[change] in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.output


def test_a_run_without_any_reply_fails(here: Path) -> None:
    write_app(here / "app")
    done = run("app", "--workers", "1", "--run-config", "mode=text")
    assert done.exit_code == 1
    assert "0 of at least 1 needed clients reported" in done.stderr.splitlines()[-1]


BAD_APPS: dict[str, tuple[dict[str, str], str]] = {
    "server raises": ({"server": "raise OSError('no disk')"}, "raised OSError: no disk"),
    "client does not exist": ({"client": "other = 1"}, "has no 'app'"),
    "client is no ClientApp": ({"client": "app = 1"}, "is a int; expected a ClientApp"),
    "nothing is installed": ({"client": "import no_such_module"}, "No module named 'no_such_module'"),
    "no components": ({"project": "[project]\nname = 'small'\n"}, "has no text clientapp"),
    "no TOML": ({"project": "[project"}, "is not TOML"),
}


@pytest.mark.parametrize("name", BAD_APPS)
def test_a_bad_app_is_one_line(here: Path, name: str) -> None:
    changes, expected = BAD_APPS[name]
    write_app(here / "app", **changes)
    done = run("app", "--workers", "1")
    assert done.exit_code != 0
    assert expected in done.stderr.splitlines()[-1], done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")


def test_a_folder_without_an_app(here: Path) -> None:
    done = run(".")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: pyproject.toml cannot be read: No such file")


@pytest.mark.slow
def test_an_app_that_waits_for_more_clients_than_there_are(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedplat.simulation.federated.flower.MAX_ASKED", 2)
    write_app(here / "app")
    done = run("app", "--workers", "1", "--num-clients", "1")
    assert done.exit_code == 2
    assert "waits for more clients than there are (1)" in done.stderr.splitlines()[-1]


def test_mistakes_in_the_file_are_named_by_key(here: Path) -> None:
    mistakes = "[selection]\ngaol = 1\n[deadlines]\ntraining_s = 'x'\n[simulation]\nsede = 2\n"
    write_app(here / "app", fedplat=mistakes)
    done = run("app")
    assert done.exit_code == 2
    file = here / "app/fedplat.toml"
    assert done.stderr.splitlines()[0].startswith(f"error: {file}: selection.gaol = 1: there is no such key")
    assert f"error: {file}: deadlines.training_s = 'x': expected a number" in done.stderr
    assert f"error: {file}: simulation.sede = 2: there is no such key; did you mean seed?" in done.stderr


def test_the_file_cannot_decide_what_the_app_decides(here: Path) -> None:
    text = "rounds = 3\n[selection]\ngoal = 5\n[simulation]\nheld_out = 0.5\n[flower]\nmax_reply_mb = 0.001\n"
    folder = write_app(here / "app", fedplat=text)
    with pytest.raises(JobFileError, match=r"rounds: .*\n.*selection.goal: .*\n.*simulation.held_out: ") as caught:
        run_app(folder)
    assert "max_reply_mb" not in str(caught.value)
    (folder / "fedplat.toml").write_text("[privacy]\nepsilon = 1.0\n")
    with pytest.raises(JobFileError, match="privacy: the ServerApp reads the replies of single clients"):
        run_app(folder)


def test_the_tables_of_the_file_apply(here: Path) -> None:
    text = "[simulation]\nseed = 5\nworkers = 1\n[simulation.fleet]\nnum_clients = 8\n[flower]\nmax_reply_mb = 0.0001\n"
    folder = write_app(here / "app", flower_apps.OWN_LOOP, flower_apps.OWN_LOOP_CLIENT, fedplat=text)
    sets: list[MessageSetResult] = []
    done = run_app(folder, on_messages=sets.append)
    assert (done.result.seed, done.result.num_clients, done.computed.engine) == (5, 8, "loop")
    assert done.result.status == "FAILED"
    assert len(sets) == 3  # retry.max_attempts
    assert "flower.max_reply_mb allows 104" in sets[0].failures[0]
    shown = run("app", "--dir", "shown")
    assert shown.exit_code == 1
    assert shown.stderr.count("allows 104") == 4, "each of 3 attempts and the end say it once"


def test_a_client_app_may_start_processes(here: Path) -> None:
    """PyTorch's data loaders do, with `num_workers`."""
    done = run_app(write_app(here / "app"), AppOptions(("mode=child",), workers=2))
    assert (done.result.status, done.result.totals.counts) == ("COMPLETED", {"MERGED": 14})


def test_a_worker_that_dies_is_named(here: Path) -> None:
    folder = write_app(here / "app")
    with pytest.raises(EngineError, match=r"worker process \d+ ended with status 3 while the ClientApp of"):
        run_app(folder, AppOptions(("mode=exit",), workers=2))


@pytest.mark.parametrize(("module", "name"), [("jax", "JAX"), ("tensorflow", "TensorFlow")])
def test_an_app_whose_library_cannot_be_forked_runs_in_one_process(
    here: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})  # pyright: ignore[reportUnknownLambdaType]
    folder = write_app(here / "app")
    assert run_app(folder).computed.workers == 1
    with pytest.raises(EngineError, match=f"small imports {name}, which cannot run in worker processes"):
        run_app(folder, AppOptions(workers=2))


def test_a_job_of_a_flower_app_is_no_simulation_file(here: Path) -> None:
    write_app(here / "app")
    done = run_app("app", AppOptions(workers=1))
    (here / "job.toml").write_text(done.file.to_toml())
    with pytest.raises(JobFileError, match="fedplat flower run APP_DIR"):
        simulate("job.toml")


def test_the_number_of_clients_may_exceed_that_of_workers(here: Path) -> None:
    folder = write_app(here / "app", flower_apps.OWN_LOOP, flower_apps.OWN_LOOP_CLIENT)
    done = run_app(folder, AppOptions(num_clients=200, workers=2))
    assert np.array_equal(done.result.participation.merged, np.full(200, 2))


def test_the_file_of_the_page_works(here: Path) -> None:
    page = (ROOT / "docs/flower.md").read_text("utf-8")
    (text,) = re.findall(r"<!-- file: fedplat.toml -->\n```toml\n(.*?)```", page, flags=re.DOTALL)
    folder = write_app(here / "app", fedplat=text)
    done = run_app(folder, AppOptions(("num-rounds=1",), num_clients=20, workers=1))
    assert (done.result.seed, done.result.status, done.result.totals.rounds) == (1, "COMPLETED", 2)
    assert done.file.job.selection.over_selection == 1.25
