"""The simulation file: a job file and what surrounds the job."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fedplat.errors import JobFileError
from fedplat.job import parse_job
from fedplat.simulation import setup
from fedplat.simulation.clients import FleetOptions, build_fleet
from fedplat.simulation.data import partitioners, sources
from fedplat.simulation.run import Simulation, run
from fedplat.simulation.scenario import file

JOB = """# a policy
name = "digits"
population = "demo"
trainer = "digits"
rounds = 3 # few

[model]
initial = "fedplat.pytorch.models:digits_2nn"

[selection]
goal = 2
"""
TABLES = """
[simulation]
seed = 4
target = 0.9

[simulation.data] # comes with scikit-learn
source = "digits"

[simulation.partition]
scheme = "dirichlet"
clients = 5
alpha = 0.3

[ simulation . fleet ]
speed = { kind = "lognormal", median = 50.0 }
"""
HERE = Path()


def mistakes(text: str, *changes: str) -> list[str]:
    with pytest.raises(JobFileError) as caught:
        file.parse(text, HERE, changes)
    return str(caught.value).splitlines()


def test_a_job_file_is_a_simulation_file() -> None:
    read = file.parse(JOB, HERE)
    assert read.job == parse_job(JOB)
    assert read.simulation.seed == 0
    assert read.simulation.data is None
    assert read.simulation.until_s == 365 * 86_400.0


def test_what_surrounds_the_job() -> None:
    read = file.parse(JOB + TABLES, HERE)
    assert read.simulation.seed == 4
    assert read.simulation.data == sources.Digits()
    assert read.simulation.partition == partitioners.Dirichlet(clients=5, alpha=0.3)


def test_all_mistakes_are_told_at_once_by_their_keys() -> None:
    text = JOB.replace("goal = 2", "goals = 2") + TABLES.replace("alpha", "alfa").replace("seed = 4", "sed = 4")
    found = mistakes(text.replace('"digits"\n\n[simulation.partition]', '"digitz"\n\n[simulation.partition]'))
    assert [line.partition(":")[0] for line in found] == [
        "selection.goals = 2",
        "selection.goal",
        "simulation.sed = 4",
        "simulation.data.source = 'digitz'",
        "simulation.partition.alfa = 0.3",
    ]
    assert found[0].endswith("did you mean goal?")
    assert found[2].endswith("did you mean seed?")
    assert found[3].endswith("did you mean digits?")
    assert found[4].endswith("did you mean alpha?")


def test_what_only_a_server_does_is_refused() -> None:
    warm = '[warm_start]\ntrainer = "public"\nbatch_size = 8\nlearning_rate = 0.1\n'
    step = '[server_step]\ntrainer = "public"\nbatch_size = 8\nlearning_rate = 0.1\nsteps = 2\n'
    job = file.parse(JOB + warm + step, HERE)  # as it is submitted
    with pytest.raises(JobFileError, match=r"^\[warm_start\] and \[server_step\]: a simulation .*model\.initial"):
        setup.prepare(job).__enter__()
    with pytest.raises(JobFileError, match=r"^\[warm_start\] and"):
        run(Simulation(spec=job.job, fleet=build_fleet(FleetOptions(num_clients=4), 0)))
    assert file.parse(JOB + "[pool]\nranks = 4\n", HERE).job.num_ranks == 4, "they change no result"


def test_a_table_is_expected() -> None:
    assert mistakes("simulation = 3\n" + JOB) == ["simulation = 3: expected a table, [simulation]"]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="the file cannot be read: No such file"):
        file.read(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("change", "path", "value"),
    [
        ("rounds=7", ("rounds",), 7),
        (" selection.goal = 5", ("selection", "goal"), 5),
        ("config.learning_rate=0.5", ("config", "learning_rate"), 0.5),
        ("simulation.data.source=mnist", ("simulation", "data", "source"), "mnist"),
        ('name="other"', ("name",), "other"),
        ('simulation.fleet.speed={kind="constant", value=3.0}', ("simulation", "fleet", "speed", "value"), 3.0),
    ],
)
def test_keys_are_changed(change: str, path: tuple[str, ...], value: object) -> None:
    found: object = file.parse(JOB + TABLES, HERE, [change]).raw
    for name in path:
        assert isinstance(found, dict)
        found = found[name]
    assert found == value


def test_a_change_is_read_like_the_file() -> None:
    assert mistakes(JOB, "selection.gaol=3")[0].startswith(
        "selection.gaol = 3: there is no such key; did you mean goal"
    )
    assert mistakes(JOB, "rounds=many")[0] == "rounds = 'many': expected a whole number"
    for wrong in ("rounds", "=3", "a b=3", ".=3", ""):
        assert "expected KEY=VALUE" in mistakes(JOB, wrong)[0]
    assert mistakes(JOB, "rounds.x=3") == ["'rounds.x=3': rounds is 3 in the file, not a table"]


def test_the_server_never_sees_the_table() -> None:
    for text in (JOB + TABLES, TABLES + "[config]\nepochs = 3\n", JOB, JOB + "[simulation]\nseed = 1\n"):
        shipped = file.job_text(text)
        assert "simulation" not in shipped
        expected = {key: value for key, value in tomllib.loads(text).items() if key != "simulation"}
        assert tomllib.loads(shipped) == expected
    assert file.job_text(JOB + TABLES).startswith(JOB)
    assert file.job_text(JOB) == JOB


@pytest.mark.parametrize("way", ["simulation.seed = 1\n", "simulation = { seed = 1 }\n", "'simulation'.seed = 1\n"])
def test_a_table_written_otherwise_is_refused(way: str) -> None:
    assert file.parse(way + JOB, HERE).simulation.seed == 1
    with pytest.raises(JobFileError, match=r"expected a table of its own, \[simulation\]"):
        file.job_text(way + JOB)


EXAMPLES = sorted(
    path
    for path in Path(__file__).resolve().parents[3].joinpath("examples").glob("*.toml")
    if not path.stem.endswith("sweep")
)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_simulation_and_a_job(path: Path) -> None:
    text = path.read_text("utf-8")
    read = file.parse(text, path.parent)
    assert read.job.name == path.stem
    assert f"fedplat simulate{' --no-training' if path.stem == 'million' else ''} examples/{path.name}" in text


def test_losses_have_names_or_are_functions() -> None:
    for loss in ("cross_entropy", "mse", "bce_with_logits", "own:loss", "losses.py:huber"):
        file.parse(JOB + f'[simulation.model]\nloss = "{loss}"\n', HERE)
    assert mistakes(JOB + '[simulation.model]\nloss = "mes"\n') == [
        "simulation.model.loss = 'mes': expected cross_entropy, mse, bce_with_logits, or module:function"
    ]
    assert mistakes(JOB + '[simulation.model]\nmodule = "net"\n') == [
        "simulation.model.module = 'net': expected module:function"
    ]
