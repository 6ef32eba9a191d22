"""Sources of data: what they read, and their errors when it is missing."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from fedplat.errors import DataError, MissingExtraError, UserCodeError
from fedplat.simulation.data import DataSource, Federation, federation, partitioners, sources
from fedplat.simulation.data.sources import common
from fedplat.testing import check_source

IID = partitioners.Iid(clients=4)
MODULE = """
import numpy as np
from fedplat.simulation.data import Dataset, Federation

X, Y = np.zeros((12, 3), np.float32), np.arange(12) % 3

def pair(): return X, Y
def four(scale=1.0): return X + scale, Y, X[:2], Y[:2]
def whole(): return Dataset.from_arrays(X, Y)
def dealt(): return Federation(X, Y, [np.arange(6), np.arange(6, 12)], X[:2], Y[:2])
def wrong(): return X
def short(): return X, Y[:5]
def fails(): return 1 / 0
"""
PLAY = """First Citizen:
Before we proceed any further, hear me speak.

All:
Speak, speak.

First Citizen:
You are all resolved
rather to die than to famish?
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDPLAT_DATA", str(tmp_path))
    return tmp_path


def write_npz(path: Path, **arrays: np.ndarray) -> None:
    np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]


def images(count: int, size: int = 28) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, size, size)).astype(np.uint8)


def test_mnist(folder: Path) -> None:
    labels = (np.arange(40) % 10).astype(np.uint8)
    write_npz(folder / "mnist.npz", x_train=images(40), y_train=labels, x_test=images(10), y_test=labels[:10])
    found = federation(sources.Mnist(), IID)
    assert found.inputs.shape == (40, 1, 28, 28)
    assert found.test_inputs.shape == (10, 1, 28, 28)
    assert found.inputs.dtype == np.float32
    assert found.targets.dtype == np.int64
    np.testing.assert_allclose(found.inputs[:, 0], images(40) / 255.0, atol=1e-7)
    check_source(sources.Mnist())
    standard = federation(sources.Mnist(scale="standard"), IID)
    np.testing.assert_allclose(standard.inputs, (found.inputs - 0.1307) / 0.3081, atol=1e-5)


@pytest.mark.parametrize("source", [sources.Mnist(), sources.Shakespeare()])
def test_what_is_missing_is_said(source: DataSource, folder: Path) -> None:
    with pytest.raises(DataError, match=r"is not in .*; set FEDPLAT_DATA to the folder that has it. It "):
        federation(source, None)


def test_digits_hold_out_the_same_for_every_seed() -> None:
    one, other = (federation(sources.Digits(), IID, seed=seed) for seed in (1, 2))
    assert one.inputs.shape == (1438, 1, 8, 8)
    assert len(one.test_inputs) == 359
    assert 0.0 <= one.inputs.min() <= one.inputs.max() <= 1.0
    np.testing.assert_array_equal(one.test_inputs, other.test_inputs)
    assert not np.array_equal(one.parts[0], other.parts[0])
    assert len(federation(sources.Digits(test_fraction=0.0), IID).test_inputs) == 0
    check_source(sources.Digits())


def test_shakespeares_speakers_are_clients(folder: Path) -> None:
    (folder / "tinyshakespeare.txt").write_text(PLAY)
    found = federation(sources.Shakespeare(length=10, min_examples=2, test_fraction=0.25), None)
    assert found.names == ("All", "First Citizen")
    check_source(sources.Shakespeare(length=10, min_examples=2, test_fraction=0.25))
    assert found.sizes().tolist() == [2, 64]  # 13 - 10 = 3 and 96 - 10 = 86 examples, a quarter of which is held out
    said = common.character_codes("Speak, speak.")
    inputs, targets = found.examples(0)
    np.testing.assert_array_equal(inputs, [said[:10], said[1:11]])
    np.testing.assert_array_equal(targets, said[10:12])
    # The held-out part shares no character with the training part: it begins at 64 + 10.
    assert len(found.test_inputs) == 86 - 74
    assert "".join(common.CHARACTERS[code] for code in found.test_inputs[0]) == "to die tha"
    with pytest.raises(DataError, match="no speaker in"):
        federation(sources.Shakespeare(), None)


def test_characters_have_codes_of_their_own() -> None:
    assert len(set(common.CHARACTERS)) == len(common.CHARACTERS) < 256
    assert "".join(common.CHARACTERS[code] for code in common.character_codes("Ab\nü€")) == "Ab\n\ufffd\ufffd"


def test_npz_with_owners(folder: Path) -> None:
    labels = np.arange(20).astype(np.int32) % 2
    owners = np.array(["a", "b", "b", "c"] * 5)
    write_npz(folder / "own.npz", a=images(20, 4), b=labels, who=owners)
    source = sources.Npz("own.npz", inputs="a", targets="b", test_inputs="", groups="who", scale="unit")
    check_source(source, folder)
    found = federation(source, None, folder=folder)
    assert found.names == ("a", "b", "c")
    assert found.sizes().sum() == 16
    assert found.inputs.dtype == np.float32
    assert found.targets.dtype == np.int64
    assert len(found.test_targets) == 4


def test_npz_mistakes(folder: Path) -> None:
    write_npz(folder / "bad.npz", x_train=images(3, 2), y_train=np.zeros(4, np.int64))
    np.savez(folder / "objects.npz", x_train=np.array([{}], object), y_train=np.zeros(1))
    (folder / "text.npz").write_text("hello")
    source = sources.Npz("bad.npz", test_inputs="")
    with pytest.raises(DataError, match=r"inputs have shape \[3, 2, 2\] and targets \[4\]"):
        federation(source, IID, folder=folder)
    with pytest.raises(DataError, match="has no array x_test, y_test; it has x_train, y_train"):
        federation(sources.Npz("bad.npz"), IID, folder=folder)
    for name in ("objects.npz", "text.npz", "none.npz"):
        with pytest.raises(DataError, match=r"cannot be read as an .npz file of plain arrays"):
            federation(sources.Npz(name, test_inputs=""), IID, folder=folder)


def test_functions_of_the_users_own(folder: Path) -> None:
    (folder / "owndata.py").write_text(MODULE)
    assert federation(sources.Function("owndata:pair"), IID, folder=folder).num_clients == 4
    four = federation(sources.Function("owndata:four", {"scale": 2.5}), IID, folder=folder)
    assert four.inputs.max() == 2.5
    assert len(four.test_inputs) == 2
    assert federation(sources.Function("owndata:whole"), IID, folder=folder).num_clients == 4
    check_source(sources.Function("owndata:pair"), folder)
    check_source(sources.Function("owndata:dealt"), folder)
    dealt = federation(sources.Function("owndata:dealt"), None, folder=folder)
    assert isinstance(dealt, Federation)
    assert dealt.num_clients == 2
    with pytest.raises(DataError, match=r"leave \[simulation.partition\] out"):
        federation(sources.Function("owndata:dealt"), IID, folder=folder)
    with pytest.raises(DataError, match=r"add a table \[simulation.partition\]"):
        federation(sources.Function("owndata:pair"), None, folder=folder)
    with pytest.raises(DataError, match="returned a ndarray; expected a Federation"):
        federation(sources.Function("owndata:wrong"), IID, folder=folder)
    with pytest.raises(DataError, match="returned arrays that do not fit"):
        federation(sources.Function("owndata:short"), IID, folder=folder)
    with pytest.raises(UserCodeError, match=r"fails\(\) raised ZeroDivisionError: .*owndata.py, line 13"):
        federation(sources.Function("owndata:fails"), IID, folder=folder)


def write_leaf(path: Path, users: dict[str, tuple[list[object], list[object]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {name: {"x": x, "y": y} for name, (x, y) in users.items()}
    sizes = [len(y) for _, y in users.values()]
    path.write_text(json.dumps({"users": list(users), "num_samples": sizes, "user_data": data}))


def test_leaf_folders(folder: Path) -> None:
    write_leaf(folder / "femnist/train/a.json", {"f1": ([[0, 1, 2, 3]] * 3, [1, 2, 3])})
    write_leaf(folder / "femnist/train/b.json", {"f2": ([[0.5, 1, 2, 3]] * 2, [4, 5]), "nobody": ([], [])})
    write_leaf(folder / "femnist/test/a.json", {"f1": ([[9, 9, 9, 9]], [7])})
    found = federation(sources.Leaf("femnist", shape=[1, 2, 2]), None, folder=folder)
    assert found.names == ("f1", "f2")
    assert found.inputs.shape == (5, 1, 2, 2)
    assert found.targets.tolist() == [1, 2, 3, 4, 5]
    assert found.test_targets.tolist() == [7]
    write_leaf(folder / "plays/train/a.json", {"HAMLET": (["to be"] * 10, ["o"] * 10)})
    check_source(sources.Leaf("femnist", shape=[1, 2, 2]), folder)
    plays = federation(sources.Leaf("plays"), None, folder=folder)
    assert plays.inputs.shape == (8, 5)
    assert set(plays.targets) == set(common.character_codes("o"))


def test_leaf_mistakes(folder: Path) -> None:
    with pytest.raises(DataError, match=r"has no .json files"):
        federation(sources.Leaf("none"), None, folder=folder)
    cases = {
        "uneven": ({"u": ([[1]], [1, 2])}, "has different numbers of x and y"),
        "empty": ({"u": ([], [])}, "no user in"),
        "ragged": ({"u": ([[1], [1, 2]], [1, 2])}, "expected values that are all numbers of one shape"),
        "texts": ({"u": (["a", "ab"], ["a", "b"])}, "expected all of one length"),
    }
    for name, (users, words) in cases.items():
        write_leaf(folder / name / "train/a.json", users)  # pyright: ignore[reportArgumentType]
        with pytest.raises(DataError, match=words):
            federation(sources.Leaf(name), None, folder=folder)
    (folder / "empty/train/a.json").write_text("{}")
    with pytest.raises(DataError, match="is not a LEAF file"):
        federation(sources.Leaf("empty"), None, folder=folder)
    write_leaf(folder / "shape/train/a.json", {"u": ([[1, 2, 3]], [1])})
    with pytest.raises(DataError, match=r"shape = \[2, 2\] does not fit"):
        federation(sources.Leaf("shape", shape=[2, 2]), None, folder=folder)


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs the extra datasets")
def test_hugging_face_from_the_disk(folder: Path) -> None:
    import datasets

    columns = {"pixels": images(10, 4).tolist(), "label": list(range(10)), "writer": ["a", "b"] * 5}
    whole = datasets.Dataset.from_dict(columns)
    whole.save_to_disk(str(folder / "one"))
    datasets.DatasetDict({"train": whole, "test": whole.select([0, 1])}).save_to_disk(str(folder / "two"))
    source = sources.HuggingFace("two", inputs="pixels", groups="writer", scale="unit")
    found = federation(source, None, folder=folder)
    assert found.names == ("a", "b")
    assert found.inputs.shape == (10, 4, 4)
    assert found.inputs.dtype == np.float32
    assert found.test_targets.tolist() == [0, 1]
    check_source(source, folder)
    held_out = federation(sources.HuggingFace("one", inputs="pixels"), IID, folder=folder)
    assert (len(held_out.inputs), len(held_out.test_inputs)) == (8, 2)
    for wrong, words in (
        (sources.HuggingFace("two"), "has no column 'image'; it has pixels, label, writer"),
        (sources.HuggingFace("two", train_split="all"), "has no split 'all'; it has train, test"),
        (
            sources.HuggingFace("two", inputs="writer"),
            r"two, train, row 1: 'a' in column 'writer' is not a number",
        ),
        (sources.HuggingFace("two", test_split="validation"), "has no split 'validation'; it has train, test"),
        (sources.HuggingFace("none"), "none cannot be loaded as a folder with a data set: there is no such folder"),
    ):
        with pytest.raises(DataError, match=words):
            federation(wrong, IID, folder=folder)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, source, words in (
        ("datasets", sources.HuggingFace("x"), r"pip install 'datasets>="),
        ("sklearn.datasets", sources.Digits(), "pip install scikit-learn"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingExtraError, match=words):
            federation(source, IID)
