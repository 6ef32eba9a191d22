"""The examples in C++ and R compute what NumPy does, and a program in Python the bits of the function."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat_client import Task, TrainResult
from fedplat_client.trainers.external import ExternalOptions, ExternalTrainer, TaskRoot, make_launcher

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "external"
EPOCHS, RATE = 20, 0.05


@pytest.fixture
def root(tmp_path: Path) -> Generator[TaskRoot]:
    with TaskRoot(tmp_path / "tasks") as root:
        yield root


def make_task() -> Task:
    model = {"weight": np.array([0.5, -1.0, 0.25], "f4"), "bias": np.array(0.125, "f4"), "steps": np.array(7)}
    return Task(
        name="linear", parameters=Parameters.from_arrays(model), config={"epochs": EPOCHS, "learning_rate": RATE}
    )


def compute(model: Parameters, data: np.ndarray) -> tuple[np.ndarray, float, float]:
    """Weight, bias and the last loss of gradient descent on the mean squared error."""
    inputs, target = data[:, :-1], data[:, -1]
    weight, bias, loss = model["weight"].astype(float), float(model["bias"]), 0.0
    for _ in range(EPOCHS):
        error = inputs @ weight + bias - target
        loss = float(np.mean(error**2))
        weight = weight - RATE * 2 * inputs.T @ error / len(target)
        bias -= RATE * 2 * float(np.mean(error))
    return weight, bias, loss


def run_program(root: TaskRoot, command: str, tmp_path: Path) -> None:
    data = np.random.default_rng(0).normal(size=(50, 4))
    path = tmp_path / "data.csv"
    np.savetxt(path, data, delimiter=",", fmt="%.17g")
    task = make_task()
    launcher = make_launcher("exec", f"{command} {path}", ExternalOptions())
    trainer = ExternalTrainer(launcher=launcher, root=root)
    result = trainer(task)
    weight, bias, loss = compute(task.parameters, data)
    trained = result.parameters
    assert isinstance(trained, Parameters)
    np.testing.assert_allclose(trained["weight"], weight, rtol=1e-6)
    np.testing.assert_allclose(trained["bias"], bias, rtol=1e-6)
    assert trained["steps"] == 7
    assert (result.num_examples, task.control.fraction) == (50, 1.0)
    np.testing.assert_allclose(result.metrics["loss"], loss, rtol=1e-9)
    evaluated = trainer.evaluate(make_task())
    error = data[:, :-1] @ task.parameters["weight"] + task.parameters["bias"] - data[:, -1]
    np.testing.assert_allclose(evaluated.metrics["loss"], np.mean(error**2), rtol=1e-9)


def test_cpp(root: TaskRoot, tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed: apt-get install --no-install-recommends g++")
    program, source = tmp_path / "linear", EXAMPLES / "linear.cpp"
    flags = ["-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, "-o", str(program), str(source)], check=True)
    run_program(root, str(program), tmp_path)


def test_r(root: TaskRoot, tmp_path: Path) -> None:
    if shutil.which("Rscript") is None:
        pytest.skip("Rscript is not installed: apt-get install --no-install-recommends r-base-core")
    run_program(root, f"Rscript {EXAMPLES / 'linear.R'}", tmp_path)


STEP = """
import numpy as np
from fedplat.model import Parameters

def step(model):
    for values in model.values():
        values[...] += np.sin(values).astype(values.dtype)

if __name__ == "__main__":
    model = Parameters.open("model.safetensors", writable=True)
    step(model)
    open("model-out.safetensors", "wb").write(model.to_bytes())
    open("result.json", "w").write('{"num_examples": 3}')
"""


def test_a_program_gives_the_bits_of_the_function(root: TaskRoot, tmp_path: Path) -> None:
    program = tmp_path / "step.py"
    program.write_text(STEP)
    names: dict[str, object] = {"__name__": "step"}
    exec(compile(STEP, "step.py", "exec"), names)
    rng = np.random.default_rng(1)
    arrays = {
        "a": rng.normal(size=(100, 10)).astype("f4"),
        "b": rng.normal(size=7),
        "c": rng.normal(size=9).astype("f2"),
    }
    model = Parameters.from_arrays(arrays)
    inside = model.copy()
    names["step"](inside)  # type: ignore[operator]
    launcher = make_launcher("exec", f"{sys.executable} {program}", ExternalOptions())
    outside = ExternalTrainer(launcher=launcher, root=root)(Task(name="step", parameters=model.copy()))
    assert outside.to_update(model) == TrainResult(parameters=inside, num_examples=3).to_update(model)
