from __future__ import annotations

import doctest
import sys
from pathlib import Path
from typing import Any

import pytest

from fedplat.errors import MissingExtraError, TrackerError
from fedplat.trackers import MlflowTracker, RoundMetrics, TrackedRun, backends, tracker

pytest.importorskip("mlflow")

RUN = TrackedRun(
    "j1",
    "job j1",
    "digits",
    {"rounds": "3", "config.learning rate": "0.1", "text": "x" * 600, **{f"many.{n}": str(n) for n in range(120)}},
    {"fedplat.job": "j1"},
)


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store of MLflow in a folder, the only one that works without a server or a database."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return f"file:{tmp_path / 'store'}"


def runs_of(uri: str, experiment: str = "digits") -> list[Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    return list(client.search_runs([found.experiment_id]))


def history(uri: str, name: str) -> list[tuple[int, float, int]]:
    from mlflow.tracking import MlflowClient

    (run,) = runs_of(uri)
    found = MlflowClient(tracking_uri=uri).get_metric_history(run.info.run_id, name)
    return [(metric.step, metric.value, metric.timestamp) for metric in found]


def test_a_run_has_params_tags_and_metrics_by_round(uri: str) -> None:
    opened = MlflowTracker(uri, RUN)
    opened.log([RoundMetrics(1, 10.0, {"clients/loss": 2.0, "clients/top 5 (%)": 50.0})])
    opened.log([RoundMetrics(2, 20.5, {"clients/loss": 1.0})])
    opened.close("FINISHED")
    (run,) = runs_of(uri)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "job j1")
    assert run.data.tags.items() >= {"fedplat.run": "j1", "fedplat.job": "j1"}.items()
    assert run.data.params == {**RUN.params, "text": "x" * backends.MAX_TEXT}
    assert history(uri, "clients/loss") == [(1, 2.0, 10_000), (2, 1.0, 20_500)]
    assert history(uri, "clients/top 5 ___") == [(1, 50.0, 10_000)]


def test_a_restarted_process_continues_the_run_without_duplicates(uri: str) -> None:
    first = MlflowTracker(uri, RUN)
    first.log([RoundMetrics(1, 10.0, {"clients/loss": 2.0}), RoundMetrics(2, 20.0, {"clients/loss": 1.0})])
    first.close("KILLED")
    again = MlflowTracker(uri, RUN)
    again.log([RoundMetrics(number, 10.0 * number, {"clients/loss": 2.0 / number}) for number in (1, 2, 3)])
    assert runs_of(uri)[0].info.status == "RUNNING"
    again.log([RoundMetrics(3, 31.0, {"clients/loss": 9.0, "server/accuracy": 0.5})])  # scored later
    again.close("RUNNING")
    assert runs_of(uri)[0].info.status == "RUNNING"
    assert history(uri, "clients/loss") == [(1, 2.0, 10_000), (2, 1.0, 20_000), (3, 2.0 / 3.0, 30_000)]
    assert history(uri, "server/accuracy") == [(3, 0.5, 31_000)]


def test_runs_of_other_keys_are_left_alone(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("j1", "j2"):
        opened = MlflowTracker(uri, TrackedRun(key, key, "digits"))
        opened.log([RoundMetrics(1, 1.0, {"clients/loss": 1.0})])
        opened.close("FINISHED")
    assert sorted(run.info.run_name for run in runs_of(uri)) == ["j1", "j2"]
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    MlflowTracker(uri, RUN).log([RoundMetrics(1, 1.0, {"clients/loss": 1.0})])
    assert len(runs_of(uri, "mine")) == 1


def test_a_server_that_is_away_is_reported_and_tried_again(uri: str, tmp_path: Path) -> None:
    opened = MlflowTracker("http://me:secret@127.0.0.1:9/", RUN)
    with pytest.raises(TrackerError, match=r"MLflow at http://127.0.0.1:9/: ") as caught:
        opened.log([RoundMetrics(1, 1.0, {})])
    assert "secret" not in str(caught.value)
    store = tmp_path / "store"
    opened = MlflowTracker(uri, RUN)
    store.rename(tmp_path / "away")
    store.touch()  # a file in place of the folder
    with pytest.raises(TrackerError):
        opened.log([RoundMetrics(1, 1.0, {"clients/loss": 1.0})])
    store.unlink()
    (tmp_path / "away").rename(store)
    opened.log([RoundMetrics(1, 1.0, {"clients/loss": 1.0})])
    assert history(uri, "clients/loss") == [(1, 1.0, 1000)]


def test_an_address_that_cannot_be_is_refused_at_once() -> None:
    with pytest.raises(TrackerError, match=r"MLflow at foo://x: .*unsupported URI"):
        MlflowTracker("foo://x", RUN)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'mlflow-skinny>="):
        MlflowTracker("http://127.0.0.1:9", RUN)


@pytest.mark.parametrize("module", [backends, tracker], ids=["mlflow", "tracker"])
def test_the_examples_are_true(module: Any) -> None:
    results = doctest.testmod(module)
    assert results.attempted
    assert not results.failed


@pytest.mark.parametrize("name", ["main%2Ffix", "a?b"])
def test_a_folder_has_the_name_that_was_given(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    tracker = MlflowTracker(name, RUN)
    tracker.log([RoundMetrics(1, 10.0, {"loss": 2.0})])
    assert [path.name for path in tmp_path.iterdir()] == [name]
