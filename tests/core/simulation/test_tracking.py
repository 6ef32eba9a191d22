"""A simulation with experiment trackers: all rounds, once, also when it is resumed or MLflow is away."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from fedplat.errors import TrackerError
from fedplat.simulation import RunFolderOptions, simulate
from fedplat.simulation.recording.result import AttemptResult
from fedplat.simulation.scenario.file import parse
from support.simulation.runs import DIGITS, write_digits

pytest.importorskip("mlflow")


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return f"file:{tmp_path / 'store'}"


class StoppedError(Exception):
    pass


def client_of(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def runs_of(uri: str) -> list[Any]:
    client = client_of(uri)
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


@pytest.mark.slow
def test_a_run_that_is_resumed_has_every_round_once(tmp_path: Path, uri: str) -> None:
    file, warnings = write_digits(tmp_path), list[str]()

    def stop(record: AttemptResult) -> None:
        if record.round == 2:
            raise StoppedError

    def options(*, resume: bool) -> RunFolderOptions:
        return RunFolderOptions(tmp_path / "kept", resume, checkpoint_s=0.0, mlflow=uri, warn=warnings.append)

    with pytest.raises(StoppedError):
        simulate(file, observe=stop, run_folder=options(resume=False))
    (stopped,) = runs_of(uri)
    assert stopped.info.status == "FAILED"
    run = simulate(file, run_folder=options(resume=True))
    (found,) = runs_of(uri)
    assert (found.info.status, found.info.run_name, warnings) == ("FINISHED", "kept", [])
    assert found.data.params["selection.goal"] == "3"
    assert found.data.params["simulation.data.source"] == "digits"
    trained = [each for each in run.result.attempts if each.kind == "TRAIN" and each.committed]
    expected = {
        "round/merged": [(each.round, each.counts["MERGED"]) for each in trained],
        "round/bytes_up": [(each.round, each.bytes_up) for each in trained],
        "held_out/accuracy": [(each.round, each.evaluation["accuracy"]) for each in trained if each.evaluation],
    }
    history = {
        name: [(each.step, each.value) for each in client_of(uri).get_metric_history(found.info.run_id, name)]
        for name in expected
    }
    assert history == expected
    simulate(file, run_folder=RunFolderOptions(tmp_path / "other", mlflow=uri))
    assert len(runs_of(uri)) == 2


def test_a_run_goes_on_without_mlflow(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        warnings: list[str] = []
        run_folder = RunFolderOptions(tmp_path / "kept", mlflow=f"http://{address}", warn=warnings.append)
        run = simulate(write_digits(tmp_path), {"simulation.training": False}, run_folder=run_folder)
    assert run.result.status == "COMPLETED"
    first, last = warnings
    assert first.startswith(f"MLflow at http://{address}: ")
    assert last.startswith(f"MLflow does not have rounds 1-{run.result.totals.rounds} of the run (")
    assert "rounds.jsonl in the run folder has all of them" in last


def test_an_address_that_cannot_be_stops_the_run_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(TrackerError, match="MLflow at foo://x"):
        simulate(write_digits(tmp_path), run_folder=RunFolderOptions(tmp_path / "kept", mlflow="foo://x"))
    assert (tmp_path / "kept" / "rounds.jsonl").read_text() == ""


@pytest.mark.slow
def test_a_private_run_has_its_cost_at_the_last_round(tmp_path: Path, uri: str) -> None:
    file = parse(
        DIGITS.replace("goal = 3\nover_selection = 1.5\nmin_fraction = 0.5", 'goal = 3\nclose = "deadline"')
        + '[updates]\nweighting = "uniform"\nclip_norm = 1.0\n'
        + '[privacy]\nparticipation = "fixed"\ndelta = 1e-5\nepsilon = 10.0\n',
        tmp_path,
    )
    run = simulate(file, run_folder=RunFolderOptions(tmp_path / "kept", mlflow=uri))
    assert run.privacy is not None
    (found,) = runs_of(uri)
    (cost,) = client_of(uri).get_metric_history(found.info.run_id, "privacy/epsilon")
    assert (cost.step, cost.value) == (4, run.privacy.epsilon)
