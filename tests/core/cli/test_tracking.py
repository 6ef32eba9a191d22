"""`fedplat job watch` with trackers: every round once, whatever happens to the watch, the server or MLflow."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedplat import trackers
from fedplat.admin import AdminClient
from fedplat.cli import following
from fedplat.errors import ServerUnreachableError
from fedplat.wire.v1 import admin_pb2
from support.cli.commands import Run
from support.cli.fake_state import State
from support.cli.story import ending, script

pytest.importorskip("mlflow")

TRAINED = {
    "clients/loss": 0.5,
    "round/attempts": 2.0,
    "round/assigned": 4.0,
    "round/reported": 2.0,
    "round/late": 1.0,
    "round/failed": 1.0,
    "round/rejected": 0.0,
    "round/surplus": 0.0,
    "round/dropped": 0.0,
    "round/update_bytes": 2048.0,
}
SCORES = {"server/accuracy": 0.75, "evaluation/accuracy": 0.7}


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return f"file:{tmp_path / 'store'}"


def only_run(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def steps(uri: str, name: str) -> list[int]:
    from mlflow.tracking import MlflowClient

    run_id = only_run(uri).info.run_id
    return [metric.step for metric in MlflowClient(tracking_uri=uri).get_metric_history(run_id, name)]


class Recorder(trackers.Tracker):
    def __init__(self) -> None:
        self.values: list[tuple[int, str, float]] = []

    def log(self, rounds: Sequence[trackers.RoundMetrics]) -> None:
        self.values += [(each.round, name, value) for each in rounds for name, value in each.values.items()]

    def close(self, status: trackers.RunStatus) -> None:
        pass


def test_a_watch_writes_every_round_once(run: Run, state: State, uri: str, tmp_path: Path) -> None:
    job = state.add_job()
    state.add_events(*script(), ending())
    command = ["job", "watch", job.job_id, "--mlflow", uri, "--tensorboard", str(tmp_path / "events"), "--json"]
    for _ in range(2):  # a second watch adds nothing
        done = run(*command)
        assert (done.exit_code, done.stderr) == (0, "")
        assert [json.loads(line)["entity"] for line in done.stdout.splitlines()][-1] == "job"
    found = only_run(uri)
    assert found.info.status == "FINISHED"
    assert found.data.tags["fedplat.job"] == job.job_id
    assert found.data.metrics.items() >= {**TRAINED, **SCORES}.items()
    assert set(found.data.metrics) == {*TRAINED, *SCORES, "round/seconds"}
    assert {name: steps(uri, name) for name in found.data.metrics} == {name: [1] for name in found.data.metrics}
    (path,) = (tmp_path / "events" / job.job_id).iterdir()
    assert scalars(path).items() >= {(1, name): value for name, value in (TRAINED | SCORES).items()}.items()


def scalars(path: Path) -> dict[tuple[int, str], float]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: dict[tuple[int, str], float] = {}
    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            assert (event.step, value.tag) not in found
            found[event.step, value.tag] = round(value.tensor.float_val[0], 6)  # of 32 bits
    return found


def test_the_job_file_is_recorded(run: Run, state: State, uri: str) -> None:
    job = state.add_job()
    job.job_file = 'name = "digits"\nrounds = 2\n[selection]\ngoal = 8\n'
    state.add_events(*script(), ending())
    assert run("job", "watch", "digits", "--mlflow", uri).exit_code == 0
    assert only_run(uri).data.params == {"name": "digits", "rounds": "2", "selection.goal": "8"}


def test_the_cost_of_a_private_job_is_recorded(run: Run, state: State, uri: str) -> None:
    job = state.add_job()
    job.job_file = 'name = "digits"\n[privacy]\ndelta = 1e-5\n'
    cost = admin_pb2.PrivacyCost(releases=1, epsilon=0.625)
    state.privacy = admin_pb2.ShowPrivacyResponse(jobs=[admin_pb2.JobPrivacy(job_id=job.job_id, released=cost)])
    state.add_events(*script(), ending())
    assert run("job", "watch", "digits", "--mlflow", uri).exit_code == 0
    assert only_run(uri).data.metrics["privacy/epsilon"] == 0.625
    assert steps(uri, "privacy/epsilon") == [1]


def test_a_tracking_server_that_is_away_does_not_end_the_watch(run: Run, state: State, closed_port: str) -> None:
    job = state.add_job()
    state.add_events(*script(), ending())
    done = run("job", "watch", job.job_id, "--mlflow", f"http://{closed_port}")
    assert done.exit_code == 0
    assert "is COMPLETED" in done.stdout
    first, last = done.stderr.splitlines()
    assert first.startswith(f"warning: MLflow at http://{closed_port}: ")
    assert last.startswith("warning: MLflow does not have round 1 (")
    assert last.endswith(f"repeat: fedplat job watch {job.job_id} --mlflow URI")


def test_an_address_that_cannot_be_ends_the_command(run: Run, state: State) -> None:
    job = state.add_job()
    done = run("job", "watch", job.job_id, "--mlflow", "foo://x")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: MLflow at foo://x: ")


class Costs:
    """The answers to questions for the privacy cost; an error for None."""

    def __init__(self, *answers: tuple[int, float] | None) -> None:
        self.answers: Iterator[tuple[int, float] | None] = iter(answers)

    def __call__(self) -> tuple[int, float]:
        answer = next(self.answers)
        if answer is None:
            raise ServerUnreachableError("no server answers (gone)", reason="gone")
        return answer


def committed(number: int) -> admin_pb2.JobEvent:
    return admin_pb2.JobEvent(
        entity="attempt", round=number, attempt=1, to_state="COMMITTED", kind=admin_pb2.ATTEMPT_KIND_TRAIN
    )


def test_the_privacy_cost_belongs_to_the_round_of_its_release() -> None:
    clock = [0.0]
    recorder = Recorder()
    rounds = following.RoundTracker([recorder], Costs((3, 0.9), (2, 0.6), None, (3, 0.9)), lambda: clock[0])
    rounds.add(committed(1))  # of the past: the server has committed three rounds already
    rounds.add(committed(2))  # too soon for another question
    clock[0] += following.PRIVACY_EVERY_S
    rounds.add_privacy()
    clock[0] += following.PRIVACY_EVERY_S
    rounds.add(committed(3))  # the server is away
    rounds.add_privacy()
    costs = [(number, value) for number, name, value in recorder.values if name == "privacy/epsilon"]
    assert costs == [(2, 0.6), (3, 0.9)]


def test_a_job_without_privacy_has_no_cost(client: AdminClient, state: State, tmp_path: Path) -> None:
    job = state.add_job()
    told: list[str] = []
    options = following.TrackerOptions(tensorboard=tmp_path)
    with following.track_job(client, job, options, told.append) as track:
        for event in script():
            track(event)
    (path,) = (tmp_path / job.job_id).iterdir()
    names = {name for _, name in scalars(path)}
    assert names == {*TRAINED, *SCORES, "round/seconds"}
    assert told == []
