"""docs/learners.md: its files run, and it has all estimators."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fedplat.config import user_code
from fedplat.model import Parameters
from fedplat.simulation.api import simulate
from fedplat.sklearn.learner import ESTIMATORS
from fedplat_client import Task
from support.learners import read_page

FILES = read_page()
PAGE = (Path(__file__).resolve().parents[3] / "docs" / "learners.md").read_text("utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def digits() -> tuple[Any, Any]:
    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32), labels


def test_its_estimator_learns_to_read_digits(folder: Path) -> None:
    assert set(FILES) == {"digits.toml", "model.py", "client.py", "predict.py", "lit.py", "lit.toml", "lit_client.py"}
    run = simulate(folder / "digits.toml", {"simulation.engine": "loop", "rounds": 3})
    assert run.summary.best is not None
    assert run.summary.best.value > 0.5  # by chance 0.1
    assert run.model is not None
    (folder / "model.safetensors").write_bytes(run.model.to_bytes())
    inputs, labels = digits()
    found = user_code.load("predict.py:predict", folder)(folder / "model.safetensors", inputs)
    assert np.mean(found == labels) > 0.5
    trainer = user_code.load("client.py:make_trainer", folder)(inputs, labels)
    score = trainer.evaluate(Task(name="digits", parameters=run.model.copy()))
    assert score.metrics["accuracy"] == np.mean(found == labels)


@pytest.mark.slow
def test_its_module_learns_to_read_digits(folder: Path) -> None:
    pytest.importorskip("lightning")
    import torch
    from torch.utils.data import TensorDataset

    run = simulate(folder / "lit.toml", {"simulation.engine": "loop", "rounds": 1})
    assert run.summary.best is not None
    assert run.summary.best.value > 0.1
    assert run.model is not None
    inputs, labels = digits()
    dataset = TensorDataset(torch.from_numpy(inputs), torch.from_numpy(labels))
    trainer = user_code.load("lit_client.py:make_trainer", folder)(dataset)
    task = Task(name="digits", parameters=run.model.copy(), config={"learning_rate": 0.1, "batch_size": 16})
    assert trainer(task).num_examples == len(labels)
    assert isinstance(task.parameters, Parameters)
    assert trainer.evaluate(task).metrics["accuracy"] > 0.8


def test_it_has_all_estimators() -> None:
    for reference in ESTIMATORS:
        assert f"`{reference}`" in PAGE or f"`{reference.partition(':')[2]}`" in PAGE
