"""One call turns a file, or records, into all results of a run."""

from __future__ import annotations

import dataclasses
import doctest
import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedplat.errors import DataError, JobFileError
from fedplat.model import Parameters
from fedplat.simulation import api
from fedplat.simulation.api import Run, simulate
from fedplat.simulation.data import Dataset, deal, partitioners
from fedplat.simulation.recording.result import AttemptResult
from fedplat.simulation.report import plots
from fedplat.simulation.run_folder import RunFolderOptions, Throttle
from fedplat.simulation.scenario import file as files
from fedplat.simulation.scenario.file import parse
from support.simulation.runs import DIGITS, write_digits

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    return simulate(write_digits(folder), run_folder=RunFolderOptions(folder / "kept", tensorboard=True))


@pytest.mark.slow
def test_the_packages_example_reaches_its_target_in_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the file in `examples` of the repository, and what the README runs."""
    monkeypatch.chdir(tmp_path)
    example = simulate("digits")
    assert example.summary.rounds_to_target is not None
    assert example.summary.last is not None
    assert example.summary.last.value > example.summary.target
    lines = str(example).splitlines()
    assert lines[0] == "job            digits-dirichlet, seed 0"
    assert lines[1] == "status         COMPLETED"
    assert any(line.startswith("accuracy 0.85  after ") for line in lines)
    text = (ROOT / "examples" / "digits-dirichlet.toml").read_text()
    assert text.partition("\n")[2] == (Path(files.__file__).parent / "examples" / "digits.toml").read_text()


def test_a_file_with_a_mistake_is_named(tmp_path: Path) -> None:
    missing, wrong = tmp_path / "missing.toml", tmp_path / "wrong.toml"
    with pytest.raises(JobFileError, match=f"^{missing}: the file cannot be read: No such file or directory$"):
        simulate(missing)
    wrong.write_text('name = "a"\nround = 3\n')
    with pytest.raises(JobFileError, match=f"^{wrong}: round = 3: there is no such key"):
        simulate(wrong)


def test_the_docstrings_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    results = doctest.testmod(api)
    assert results.attempted == 2
    assert not results.failed


def test_all_numbers_of_a_run(run: Run) -> None:
    assert run.result.status == "COMPLETED"
    assert run.summary.last is not None
    assert run.summary.last.round == 4
    assert run.summary.rounds_to_target is not None
    accuracy = run.series("accuracy")
    assert accuracy.rounds.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert (np.diff(accuracy.at_s) > 0.0).all()
    assert accuracy.values[-1] == run.summary.last.value
    assert run.model is not None
    assert run.computed.engine == "loop"
    assert run.computed.updates == run.result.participation.merged.sum() > 0
    assert run.federation is not None
    assert run.federation.num_clients == run.result.num_clients == 20


def test_the_schema_of_the_results_is_stable(run: Run) -> None:
    """Readers of results.json rely on these keys; another format has another number."""
    found = json.loads(run.to_json())
    assert found["format"] == 1
    assert set(found) == {
        *("format", "summary", "simulation", "job", "seed", "num_clients", "status", "reason", "totals", "staleness"),
        *("groups", "attempts", "computed"),
    }
    assert set(found["summary"]) == {
        *("metric", "last", "best", "target", "rounds_to_target", "seconds_to_target", "of_clients", "federated"),
    }
    assert set(found["summary"]["best"]) == {"value", "round", "at_s"}
    assert set(found["computed"]) == {"engine", "workers", "wall_s", "updates", "updates_per_s", "versions"}
    assert found["simulation"]["simulation"]["partition"]["alpha"] == 0.5


def test_what_is_kept(run: Run) -> None:
    folder = Path(str(run.file.folder)) / "kept"
    assert json.loads((folder / "results.json").read_text()) == json.loads(run.to_json())
    assert Parameters.open(folder / "model.safetensors") == run.model
    counts = Parameters.open(folder / "participation.safetensors")
    np.testing.assert_array_equal(counts["merged"], run.result.participation.merged)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert lines == json.loads(run.to_json())["attempts"]
    assert list((folder / "tensorboard").iterdir())
    assert {path.name for path in run.save_plots(folder)} >= {
        "accuracy.png",
        "time.png",
        "participation.png",
        "data.png",
    }
    with pytest.raises(DataError, match="has a run already"):
        simulate(run.file, run_folder=RunFolderOptions(folder))


def test_equal_files_give_equal_runs(run: Run) -> None:
    again = simulate(run.file)
    assert again.model == run.model
    numbers, expected = again.to_dict(), run.to_dict()
    for each in (numbers, expected):
        del each["computed"]
    assert numbers == expected
    other = simulate(dataclasses.replace(run.file, simulation=parse(DIGITS, Path(), ["simulation.seed=1"]).simulation))
    assert other.model != run.model


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("stop_at", [1, 3])
def test_a_run_that_was_stopped_resumes(run: Run, stop_at: int, tmp_path: Path) -> None:
    def observe(record: AttemptResult) -> None:
        if record.round == stop_at:
            raise StoppedError

    with pytest.raises(StoppedError):
        simulate(run.file, observe=observe, run_folder=RunFolderOptions(tmp_path / "kept", checkpoint_s=0.0))
    heard: list[int] = []
    run_folder = RunFolderOptions(tmp_path / "kept", resume=True)
    resumed = simulate(run.file, observe=lambda record: heard.append(record.round), run_folder=run_folder)
    assert resumed.model == run.model
    assert resumed.to_dict() | {"computed": 0} == run.to_dict() | {"computed": 0}
    assert heard == [record.round for record in run.result.attempts]  # including those of the first process
    merged = [record.counts["MERGED"] for record in run.result.attempts if record.version > stop_at]
    assert resumed.computed.updates == sum(merged)


def test_scheduling_alone_takes_no_torch_and_no_data(tmp_path: Path) -> None:
    text = "\n".join(line for line in DIGITS.splitlines() if "engine" not in line)
    text = text.replace('[simulation.data]\nsource = "digits"', "").partition("[simulation.partition]")[0]
    read = parse(
        text + "[simulation.fleet]\nnum_clients = 500\n",
        tmp_path,
        ["simulation.training=false", "simulation.model_bytes=1000"],
    )
    found = simulate(read)
    assert found.computed.engine == "none"
    assert found.model is None
    assert found.result.totals.rounds == 4
    assert found.summary.best is None
    assert found.result.totals.bytes_up == 1000 * found.result.totals.counts["MERGED"]


def test_own_data_and_an_own_model(tmp_path: Path) -> None:
    """Regression y = x w: a module, a loss and data that exist in Python only."""
    from torch import nn

    from fedplat.pytorch.training import Learner

    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(400, 3)).astype(np.float32)
    targets = inputs @ np.array([[1.0], [-2.0], [0.5]], np.float32)
    data = deal(
        Dataset.from_arrays(inputs[:300], targets[:300], (inputs[300:], targets[300:])), partitioners.Iid(10), 0
    )
    learner = Learner(model=lambda: nn.Linear(3, 1), loss=nn.functional.mse_loss)
    text = DIGITS.partition("[simulation.data]")[0].replace("rounds = 4", "rounds = 10")
    found = simulate(parse(text, tmp_path, ["simulation.target_metric=loss"]), data=data, learner=learner)
    assert found.summary.best is not None
    assert found.summary.best.value < 0.1
    assert found.model is not None
    np.testing.assert_allclose(found.model["weight"], [[1.0, -2.0, 0.5]], atol=0.3)


def test_modules_and_losses_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "ownmodel.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def module(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
        "def tensors(): return module().state_dict()\n"
        "def loss(outputs, targets): return nn.functional.cross_entropy(outputs, targets) * 2\n"
        "def broken(outputs, targets): raise RuntimeError('no loss')\n"
    )
    named = ['model.initial="ownmodel:tensors"', 'simulation.model.loss="ownmodel:loss"', "rounds=1"]
    own = 'simulation.model.module="ownmodel:module"'
    found = simulate(parse(DIGITS, tmp_path, [*named, own]))
    assert found.model is not None
    assert set(found.model) == {"1.weight", "1.bias"}
    with pytest.raises(JobFileError, match=r"ownmodel:tensors returned a OrderedDict; expected a PyTorch module"):
        simulate(parse(DIGITS, tmp_path, named))
    other = 'simulation.model.module="fedplat.pytorch.models:digits_2nn"'
    with pytest.raises(JobFileError, match=r"does not fit fedplat.pytorch.models:digits_2nn"):
        simulate(parse(DIGITS, tmp_path, [*named, other]))
    with pytest.raises(JobFileError, match="has tensors and no module"):
        simulate(parse(DIGITS, tmp_path, ['model.initial="x.safetensors"']))


@pytest.mark.parametrize(
    ("remove", "words"),
    [
        ('[simulation.data]\nsource = "digits"\n', r"there is no data to partition; add a table \[simulation.data\]"),
        ("epochs = 1\n", "config.epochs: this key is required"),
    ],
)
def test_what_is_missing_is_said(remove: str, words: str, tmp_path: Path) -> None:
    assert remove in DIGITS
    with pytest.raises(JobFileError, match=words):
        simulate(parse(DIGITS.replace(remove, ""), tmp_path))


def test_clients_score_what_they_keep_from_training(tmp_path: Path) -> None:
    """All clients score, so their mean is the score on everything that they keep."""
    everybody = '[evaluation]\nevery = 2\n[evaluation.clients]\nevaluator = "digits"\ngoal = 20\nmin_fraction = 1.0\n'
    text = DIGITS.replace("[simulation]", everybody + "[simulation]\nheld_out = 0.25").replace("fails = 0.05", "")
    run = simulate(parse(text, tmp_path))
    evaluations = [record for record in run.result.attempts if record.kind == "EVALUATE"]
    assert [record.round for record in evaluations] == [2, 4]
    assert run.federation is not None
    assert run.model is not None
    kept, trained_on = (np.concatenate(parts) for parts in (run.federation.held_out, run.federation.parts))
    assert not set(kept) & set(trained_on)
    assert len(kept) == pytest.approx((len(kept) + len(trained_on)) / 4, abs=10)
    inputs = run.federation.inputs[kept].reshape(len(kept), -1)
    names = sorted(run.model)
    hidden = inputs
    weights = [run.model[name] for name in names]
    for bias, weight in zip(weights[::2], weights[1::2], strict=True):
        hidden = np.maximum(hidden, 0.0) if hidden is not inputs else hidden
        hidden = hidden @ weight.T + bias
    accuracy = (hidden.argmax(1) == run.federation.targets[kept]).mean()
    assert run.summary.federated is not None
    assert run.summary.federated.round == 4
    assert run.summary.federated.value == pytest.approx(accuracy, abs=1e-6)
    assert evaluations[-1].metrics["accuracy"] == run.summary.federated.value
    figure = Figure()
    plots.draw_accuracy(figure, run.result, run.summary)
    legend = figure.axes[1].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["central test data", "clients' held-out data"]


def test_a_model_with_personal_layers_is_scored_by_clients_alone(tmp_path: Path) -> None:
    """Each client has two classes, which its own last layer learns, so it is right more often (FedPer's claim)."""
    evaluated = '[evaluation]\nevery = 4\n[evaluation.clients]\nevaluator = "digits"\ngoal = 20\n'
    text = DIGITS.replace("[simulation]", evaluated + "[simulation]\nheld_out = 0.25").replace("fails = 0.05", "")
    text = (
        text.replace('"dirichlet"', '"classes"')
        .replace("alpha = 0.5\nmin_examples = 5\n", "")
        .replace("goal = 3", "goal = 12")
    )
    common = simulate(parse(text, tmp_path)).summary
    personal = simulate(parse(text + '[simulation.model]\npersonal = ["5.*"]\n', tmp_path)).summary
    assert common.last is not None
    assert common.federated is not None
    assert personal.last is None
    assert personal.federated is not None
    assert personal.federated.value > common.federated.value + 0.1


def test_clients_that_score_must_keep_something_for_it(tmp_path: Path) -> None:
    text = DIGITS.replace("[simulation]", '[evaluation.clients]\nevaluator = "digits"\ngoal = 2\n[simulation]')
    with pytest.raises(JobFileError, match=r"evaluation.clients: .* \(simulation.held_out = 0.2\)"):
        simulate(parse(text, tmp_path))
    text = text.replace("[simulation]", "[simulation]\nheld_out = 0.2")
    own = Dataset.from_arrays(np.zeros((40, 1, 8, 8), np.float32), np.zeros(40, np.int64))
    dealt = deal(own, partitioners.Iid(clients=20), 0)
    with pytest.raises(JobFileError, match=r"simulation.held_out = 0.2: the data already defines"):
        simulate(parse(text, tmp_path), data=dealt.with_held_out(0.5, 0))


def test_training_needs_data(tmp_path: Path) -> None:
    text = DIGITS.partition("[simulation.data]")[0] + "[simulation.fleet]\nnum_clients = 9\n"
    with pytest.raises(JobFileError, match="training needs data"):
        simulate(parse(text, tmp_path))


def test_checkpoints_are_seconds_apart() -> None:
    moments = iter([0.0, 1.0, 5.0, 5.0, 6.0, 10.0, 10.0])
    due = Throttle(5.0, lambda: next(moments))
    assert [due() for _ in range(4)] == [False, True, False, True]


def test_a_private_run_reports_the_cost_of_its_releases(tmp_path: Path) -> None:
    file = parse(
        DIGITS.replace("goal = 3\nover_selection = 1.5\nmin_fraction = 0.5", 'goal = 3\nclose = "deadline"')
        + '[updates]\nweighting = "uniform"\nclip_norm = 1.0\n'
        + '[privacy]\nparticipation = "fixed"\ndelta = 1e-5\nepsilon = 10.0\n',
        tmp_path,
    )
    run = simulate(file)
    assert run.result.status == "COMPLETED"
    assert run.privacy is not None
    assert (run.privacy.releases, run.privacy.budget) == (4, 10.0)
    assert 9.9 < run.privacy.epsilon <= 10.0 < run.privacy.epsilon_rdp
    assert json.loads(run.to_json())["privacy"]["epsilon"] == run.privacy.epsilon
