"""`fedplat data`: packing and checking."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

from fedplat.cli.app import app
from fedplat.extras import install_command
from fedplat.packed import PackedReader
from support.cli.runner import CliRunner
from support.packed import examples

SOURCE = """
import torch
from torch.utils.data import TensorDataset

rows = torch.arange(12.0).reshape(6, 2)
dataset = TensorDataset(rows, torch.arange(6))
number = 5

def make():
    return dataset

def fails():
    raise OSError("no disk")

class Mixed:
    def __len__(self):
        return 3000
    def __getitem__(self, index):
        return rows[0] if index < 2000 else rows[0, :1], 0

mixed = Mixed()
triples = [(1, 2, 3)]
gradient = [(torch.zeros(2, requires_grad=True), 0)]

"""
WAITING = """
import sys

class Waiting:
    def __len__(self):
        return 5000
    def __getitem__(self, index):
        if index == 4000:
            print("waiting", flush=True)
            sys.stdin.readline()
        return [1.0, 2.0], 0

waiting = Waiting()
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.py"
    path.write_text(SOURCE)
    return path


def run(*arguments: object, status: int = 0) -> Result:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


@pytest.mark.parametrize("name", ["dataset", "make"])
def test_a_dataset_of_a_module(source: Path, tmp_path: Path, name: str) -> None:
    result = run("pack", f"{source}:{name}", "--dir", tmp_path / "a" / "data")
    assert result.stdout.startswith("packed 6 examples (")
    inputs, targets = PackedReader(tmp_path / "a" / "data").read(range(6))
    np.testing.assert_array_equal(inputs, np.arange(12, dtype=np.float32).reshape(6, 2))
    np.testing.assert_array_equal(targets, np.arange(6))


def test_arrays_and_the_result_as_json(tmp_path: Path) -> None:
    inputs, targets = examples(2500)
    np.save(tmp_path / "x.npy", inputs)
    np.save(tmp_path / "y.npy", targets)
    out = tmp_path / "data"
    options = ("--inputs", "x", "--targets", "y", "--shard-mb", "0.05", "--json")
    facts = json.loads(run("pack", tmp_path, "--dir", out, *options).stdout)
    index = PackedReader(out).index
    assert facts == {
        "path": str(out),
        "dataset": index.dataset,
        "examples": 2500,
        "files": 3,
        "size_bytes": sum(path.stat().st_size for path in out.glob("*.arrow")),
        "inputs": {"dtype": "float32", "shape": [3, 4]},
        "targets": {"dtype": "int64", "shape": []},
    }
    np.testing.assert_array_equal(PackedReader(out).read(range(2500))[0], inputs)
    assert json.loads(run("check", out, "--json").stdout) == facts
    assert "2,500 examples (" in run("check", out).stdout


def test_small_archives_in_the_order_of_their_names(tmp_path: Path) -> None:
    inputs, targets = examples(10)
    for number, part in enumerate((slice(0, 3), slice(3, 4), slice(4, 10))):
        np.savez(tmp_path / f"{number}.npz", inputs=inputs[part], targets=targets[part])
    run("pack", tmp_path, "--dir", tmp_path / "data")
    found = PackedReader(tmp_path / "data").read(range(10))
    np.testing.assert_array_equal(found[0], inputs)
    np.testing.assert_array_equal(found[1], targets)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "has no 'missing'"),
        ("number", "is a int; expected a dataset with __len__ and __getitem__, or a function"),
        ("fails", "raised OSError: no disk"),
        ("mixed", r"example 2,000: inputs is float32[1]; expected float32[2], as in the first example"),
        ("triples", "example 0 is a tuple; expected (input, target)"),
        ("gradient", "example 0 is not a pair of arrays: Can't call numpy() on Tensor that requires grad"),
    ],
)
def test_a_dataset_that_cannot_be_packed(source: Path, tmp_path: Path, name: str, message: str) -> None:
    result = run("pack", f"{source}:{name}", "--dir", tmp_path / "data", status=2)
    assert message in result.stderr
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"source.py"}


def test_files_that_cannot_be_packed(tmp_path: Path) -> None:
    folder = tmp_path / "files"

    def refused() -> str:
        error = run("pack", folder, "--dir", tmp_path / "data", status=2).stderr
        assert not (tmp_path / "data").exists()
        return error

    assert f"there is no folder {folder}; expected" in refused()
    folder.mkdir()
    assert f"{folder} has neither inputs.npy and targets.npy nor .npz files" in refused()
    np.savez(folder / "a.npz", inputs=np.zeros(3))
    assert "a.npz has no array 'targets'; it has inputs" in refused()
    np.savez(folder / "a.npz", inputs=np.zeros(3), targets=np.zeros(2))
    assert "a.npz: the arrays have the shapes [3] and [2]; expected as many rows in both" in refused()
    np.savez(folder / "a.npz", inputs=np.array([{}]), targets=np.zeros(1))
    assert "a.npz cannot be read: Object arrays cannot be loaded" in refused()
    (folder / "a.npz").write_bytes(b"PK\x03\x04" + bytes(100))
    assert "a.npz cannot be read: " in refused()
    np.save(folder / "inputs.npy", np.zeros(3))
    (folder / "targets.npy").write_bytes(b"nothing")
    assert "targets.npy cannot be read: " in refused()


def test_an_existing_folder_stays_as_it_is(source: Path, tmp_path: Path) -> None:
    assert (
        "exists; expected the name of a new folder"
        in run("pack", f"{source}:dataset", "--dir", tmp_path, status=2).stderr
    )


def test_a_damaged_folder(source: Path, tmp_path: Path) -> None:
    run("pack", f"{source}:dataset", "--dir", tmp_path / "data")
    with open(tmp_path / "data" / "shard-00000.arrow", "r+b") as file:
        file.seek(700)
        file.write(b"?")
    error = run("check", tmp_path / "data", status=2).stderr
    assert "shard-00000.arrow is damaged: its SHA-256 is not that of the index" in error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_packing_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedplat.cli", "data", "pack", "source.py:waiting", "--dir", "data"]
    (tmp_path / "source.py").write_text(WAITING)
    command += ["--shard-mb", "0.01"]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"waiting\n"
        (temporary,) = tmp_path.glob(".data-*.tmp")
        assert len([*temporary.iterdir()]) > 1
        process.send_signal(number)
        process.stdin.close()  # Python handles a signal that came just before it began to read when the read returns
        assert process.wait(60) == 128 + number
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"source.py"}


def test_pyarrow_is_missing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    error = run("pack", f"{source}:dataset", "--dir", tmp_path / "data", status=2).stderr
    assert error == f"error: packed data needs pyarrow; install it with: {install_command('tables')}\n"
    assert install_command("tables") in run("check", tmp_path, status=2).stderr
