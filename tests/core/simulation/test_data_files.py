"""Sources of files that people have: tables, images, arrays, LEAF and Hugging Face, and their partition by a column."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedplat.errors import DataError, JobFileError, MissingExtraError
from fedplat.packed import PackedWriter
from fedplat.simulation.api import simulate
from fedplat.simulation.data import DataSource, Federation, federation, partitioners, sources
from fedplat.simulation.report import data as report
from fedplat.simulation.scenario.file import parse
from support.simulation.tables import write_csv, write_images, write_leaf, write_parquet

IID = partitioners.Iid(clients=2)
BY_USER = partitioners.Column(column="user")
FEATURES = ["age", "bmi"]
HEADER = ("age", "bmi", "user", "label")
ROWS: list[Sequence[object]] = [
    (1, 0.5, "b", "well"),
    (2, 1.5, "a", "ill"),
    (3, 2.5, "b", "ill"),
    (4, 3.5, "c", "well"),
]


def table_file(folder: Path, kind: str, name: str = "people", rows: Sequence[Sequence[object]] = ROWS) -> Path:
    write = {"csv": write_csv, "parquet": write_parquet}[kind]
    return write(folder / f"{name}.{kind}", HEADER, rows)


def table_source(kind: str, **options: Any) -> DataSource:
    options = {"path": f"people.{kind}", "inputs": FEATURES, "targets": "label", "test_fraction": 0.0} | options
    return {"csv": sources.Csv, "parquet": sources.Parquet}[kind](**options)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_become_inputs_targets_and_clients(kind: str, tmp_path: Path) -> None:
    table_file(tmp_path, kind)
    found = federation(table_source(kind), BY_USER, folder=tmp_path)
    assert found.inputs.dtype == np.float32
    np.testing.assert_array_equal(found.inputs, [[1, 0.5], [2, 1.5], [3, 2.5], [4, 3.5]])
    assert found.classes == ("ill", "well")
    assert found.targets.dtype == np.int64
    assert found.targets.tolist() == [1, 0, 0, 1]
    assert found.names == ("a", "b", "c")
    assert [part.tolist() for part in found.parts] == [[1], [0, 2], [3]]
    swapped = federation(table_source(kind, classes=["well", "ill"], inputs=["bmi", "age"]), BY_USER, folder=tmp_path)
    assert swapped.targets.tolist() == [0, 1, 1, 0]
    np.testing.assert_array_equal(swapped.inputs[:, 0], [0.5, 1.5, 2.5, 3.5])


def test_targets_of_numbers(tmp_path: Path) -> None:
    table_file(tmp_path, "csv")

    def load(targets: str | list[str], **options: Any) -> Federation:
        return federation(table_source("csv", inputs="*", targets=targets, **options), BY_USER, folder=tmp_path)

    with pytest.raises(
        DataError, match=r"people.csv, row 1: 'well' in column 'label' is not a number; expected numbers"
    ):
        load("age")  # a wildcard stands for all other columns
    assert federation(table_source("csv", targets="age"), IID, folder=tmp_path).targets.tolist() == [1, 2, 3, 4]
    regression = federation(table_source("csv", inputs="age", targets="bmi"), IID, folder=tmp_path)
    assert (regression.targets.dtype, regression.targets.shape) == (np.dtype(np.float32), (4, 1))
    several = federation(table_source("csv", inputs="age", targets=["a*", "bmi"], dtype="int64"), IID, folder=tmp_path)
    np.testing.assert_array_equal(several.targets, [[1, 0.5], [2, 1.5], [3, 2.5], [4, 3.5]])
    assert several.inputs.dtype == np.int64
    with pytest.raises(DataError, match=r"people.csv, row 1: 0.5 is not a whole number of 64 bits; use another dtype"):
        federation(table_source("csv", inputs="bmi", dtype="int64"), IID, folder=tmp_path)


def test_each_file_of_a_folder_may_be_a_client(tmp_path: Path) -> None:
    (tmp_path / "hospitals").mkdir()
    for name, rows in (("north", ROWS[:3]), ("east", ROWS[3:])):
        table_file(tmp_path / "hospitals", "csv", name, rows)
    table_file(tmp_path, "csv", "test", ROWS[:2])
    source = table_source("csv", path="hospitals", inputs=["[ab]*"], test_path="test.csv")
    found = federation(source, partitioners.Column(column="file"), folder=tmp_path)
    assert found.names == ("east", "north")
    assert found.inputs[found.parts[1], 0].tolist() == [1, 2, 3]
    assert found.test_inputs[:, 0].tolist() == [1, 2]
    assert found.test_targets.tolist() == [1, 0]
    (tmp_path / "hospitals/west.csv").write_text("age,bmi,user,label\n1,2,a,ill\n,2,a,ill\n")
    with pytest.raises(DataError, match=r"hospitals/west.csv, row 2: there is no value in column 'age'; leave the row"):
        federation(source, IID, folder=tmp_path)
    (tmp_path / "test.csv").write_text("age,bmi,label\n1,2,dead\n")
    wild = table_source("csv", path="hospitals/[en]*.csv", test_path="test.csv")
    with pytest.raises(
        DataError, match=r"test.csv, row 1: the target is 'dead', which is not one of the classes 'ill'"
    ):
        federation(wild, IID, folder=tmp_path)


def test_lists_in_parquet_keep_their_shape_and_type(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pixels = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
    write = {"pixels": pa.array(pixels.tolist(), pa.list_(pa.list_(pa.uint8()))), "label": [True, False, True, False]}
    pq.write_table(pa.table(write), tmp_path / "people.parquet", row_group_size=2)
    found = federation(table_source("parquet", inputs="pixels"), IID, folder=tmp_path)
    np.testing.assert_array_equal(found.inputs, pixels)
    assert found.inputs.dtype == np.uint8
    assert found.targets.tolist() == [1, 0, 1, 0]
    scaled = federation(table_source("parquet", inputs="pixels", scale="unit"), IID, folder=tmp_path)
    np.testing.assert_allclose(scaled.inputs, pixels / 255.0, atol=1e-7)
    write["pixels"] = pa.array([[[1, 2]], [[1, 2]], [[1, 2, 3]], [[1, 2]]])
    pq.write_table(pa.table(write), tmp_path / "people.parquet")
    with pytest.raises(DataError, match=r"row 3: the list in column 'pixels' has 3 entries, and that of .*row 1 has 2"):
        federation(table_source("parquet", inputs="pixels"), IID, folder=tmp_path)
    with pytest.raises(DataError, match=r"column 'pixels' has lists, and there are 2 columns"):
        federation(table_source("parquet", inputs=["pixels", "label"], targets="label"), IID, folder=tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": "none.csv"}, r"there is no file .*none.csv; expected a file, a folder of .csv files, or wildcards"),
        ({"inputs": ["age", "weight"]}, r"people.csv has no column 'weight'; it has age, bmi, user, label"),
        ({"targets": "outcome"}, "has no column 'outcome'; it has age"),
        ({"inputs": []}, "no columns are named; expected some of age"),
        ({"delimiter": ";"}, "has no column 'label'; it has age,bmi,user,label"),
        ({"inputs": ["age", "user"]}, "row 1: 'b' in column 'user' is not a number"),
        ({"path": "rows.csv"}, r"rows.csv cannot be read as a .csv file: .*Row #3: Expected 4 columns, got 2"),
        ({"path": "nan.csv"}, r"nan.csv, row 2: inf in column 'bmi'; leave the row out of the data"),
        ({"path": "word.csv"}, r"word.csv, row 2: 'two' in column 'age' is not a number"),
        ({"path": "empty.csv"}, "has no column 'label'; it has "),
        ({"path": "header.csv"}, "header.csv has no rows; expected at least one example"),
        ({"path": "twice.csv"}, "twice.csv has two columns 'age'"),
        ({"path": "latin.csv"}, "latin.csv cannot be read as a .csv file"),
        ({"test_path": "other.csv"}, "other.csv has no column 'bmi'; it has age, label"),
    ],
)
def test_mistakes_in_csv_files(options: Mapping[str, Any], words: str, tmp_path: Path) -> None:
    table_file(tmp_path, "csv")
    head = ",".join(HEADER) + "\n"
    (tmp_path / "rows.csv").write_text(head + "1,1,a,ill\n2,2\n")
    (tmp_path / "nan.csv").write_text(head + "1,1,a,ill\n2,inf,a,ill\n")
    (tmp_path / "word.csv").write_text(head + "1,1,a,ill\ntwo,2,a,ill\n")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "header.csv").write_text(head)
    (tmp_path / "twice.csv").write_text("age,age,bmi,label\n1,1,1,ill\n")
    (tmp_path / "latin.csv").write_bytes(head.encode() + b"1,1,a,krank\xe4\n")
    (tmp_path / "other.csv").write_text("age,label\n1,ill\n")
    with pytest.raises(DataError, match=words):
        federation(table_source("csv", **options), IID, folder=tmp_path)


def test_mistakes_in_parquet_files(tmp_path: Path) -> None:
    write_parquet(tmp_path / "people.parquet", HEADER, [*ROWS, (5, None, "a", "ill"), (6, 1.0, None, "ill")])
    with pytest.raises(DataError, match=r"people.parquet, row 5: there is no value in column 'bmi'"):
        federation(table_source("parquet"), IID, folder=tmp_path)
    with pytest.raises(DataError, match=r"people.parquet, row 6: there is no value in column 'user'"):
        federation(table_source("parquet", inputs="age"), BY_USER, folder=tmp_path)
    (tmp_path / "people.parquet").write_text("age,label\n")
    with pytest.raises(DataError, match=r"people.parquet cannot be read as a .parquet file"):
        federation(table_source("parquet"), IID, folder=tmp_path)


def test_the_partition_by_a_column(tmp_path: Path) -> None:
    rows = [(index, index / 2, [30, 4, 100][index % 3 if index < 6 else 0], "ill") for index in range(8)]
    table_file(tmp_path, "parquet", rows=rows)
    source = table_source("parquet")
    everyone = federation(source, BY_USER, folder=tmp_path)
    assert everyone.names == ("4", "30", "100")  # sorted by value, and these are numbers
    assert [part.tolist() for part in everyone.parts] == [[1, 4], [0, 3, 6, 7], [2, 5]]
    few = federation(source, partitioners.Column(column="user", min_examples=3), folder=tmp_path)
    assert few.names == ("30",)
    drawn = federation(source, partitioners.Column(column="user", max_clients=2), seed=4, folder=tmp_path)
    again = federation(source, partitioners.Column(column="user", max_clients=2, seed=4), seed=5, folder=tmp_path)
    assert drawn.names == again.names
    assert len(drawn.names) == 2
    with pytest.raises(DataError, match="none of 3 values has 9 examples; use a smaller min_examples"):
        federation(source, partitioners.Column(column="user", min_examples=9), folder=tmp_path)
    write_images(tmp_path / "images", ["cat"], 2)
    with pytest.raises(DataError, match=r"column = 'user': the data has no such column; its source reads no columns$"):
        federation(sources.Images("images"), BY_USER, folder=tmp_path)


def test_held_out_examples_leave_columns(tmp_path: Path) -> None:
    table_file(tmp_path, "csv", rows=ROWS * 5)
    found = federation(table_source("csv", test_fraction=0.25), BY_USER, folder=tmp_path)
    assert (len(found.inputs), len(found.test_inputs)) == (15, 5)
    by_age = {1: "b", 2: "a", 3: "b", 4: "c"}
    for name, part in zip(found.names, found.parts, strict=True):
        assert {by_age[int(age)] for age in found.inputs[part, 0]} == {name}


def test_arrays_in_files(tmp_path: Path) -> None:
    values = np.arange(12.0).reshape(6, 2)
    arrays = {"x": values, "y": np.array(["no", "yes", "no"] * 2), "who": np.array([7, 7, 5, 5, 5, 7])}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    np.savez(tmp_path / "all.npz", x=arrays["x"], y=arrays["y"], who=arrays["who"])
    npy = sources.Npy("x.npy", "y.npy", test_fraction=0.0)
    npz = sources.Npz("all.npz", inputs="x", targets="y", test_inputs="", test_fraction=0.0)
    for source, column in ((npy, "who.npy"), (npz, "who")):
        found = federation(source, partitioners.Column(column=column), folder=tmp_path)
        assert found.names == ("5", "7")
        assert found.classes == ("no", "yes")
        assert found.targets.tolist() == [0, 1, 0] * 2
        assert found.inputs.dtype == np.float32
        np.testing.assert_array_equal(found.examples(0)[0], values[2:5])
    tested = sources.Npy("x.npy", "y.npy", test_inputs="x.npy", test_targets="y.npy", classes=["yes", "no"])
    assert federation(tested, IID, folder=tmp_path).test_targets.tolist() == [1, 0, 1] * 2
    np.save(tmp_path / "nan.npy", np.where(values == 7, np.nan, values))
    np.save(tmp_path / "one.npy", np.float32(1))
    np.save(tmp_path / "objects.npy", np.array([{}], object))
    for wrong, words in (
        (sources.Npy("nan.npy", "y.npy"), r"nan.npy, row 4: a missing value \(NaN\) in inputs; leave the row out"),
        (sources.Npy("one.npy", "y.npy"), "one.npy has a single number; expected an array with a row for each example"),
        (sources.Npy("objects.npy", "y.npy"), "objects.npy cannot be read as an .npy file of a plain array"),
        (sources.Npy("none.npy", "y.npy"), "none.npy cannot be read"),
        (sources.Npy("x.npy", "y.npy", classes=["no"]), r"x.npy, row 2: the target is 'yes', which is not one of"),
        (sources.Npy("x.npy", "y.npy", test_inputs="who.npy", test_targets="y.npy"), r"inputs have shape \[\], and"),
    ):
        with pytest.raises(DataError, match=words):
            federation(wrong, IID, folder=tmp_path)


def test_folders_of_images(tmp_path: Path) -> None:
    pixels = write_images(tmp_path / "images", ["cat", "dog"], 3)
    write_images(tmp_path / "test", ["dog"], 1)
    (tmp_path / "images/cat/notes.txt").write_text("not an image")
    found = federation(sources.Images("images", test_path="test"), IID, folder=tmp_path)
    assert found.classes == ("cat", "dog")
    assert found.targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.test_targets.tolist() == [1]
    np.testing.assert_allclose(found.inputs, np.moveaxis(pixels, -1, 1) / 255.0, atol=1e-7)
    gray = federation(sources.Images("images", channels=1, size=[2, 3], scale="none"), IID, folder=tmp_path)
    assert gray.inputs.shape[1:] == (1, 2, 3)
    expected = np.asarray(Image.fromarray(pixels[0]).convert("L").resize((3, 2), Image.Resampling.BILINEAR))
    source = sources.Images("images", channels=1, size=[2, 3], scale="none", test_fraction=0.0)
    np.testing.assert_array_equal(federation(source, IID, folder=tmp_path).inputs[0, 0], expected)


def test_folders_of_owners_with_images(tmp_path: Path) -> None:
    for name in ("zoe", "adam"):
        write_images(tmp_path / "phones" / name, ["cat", "dog"], 2)
    found = federation(sources.Images("phones", owners=True, test_fraction=0.0), None, folder=tmp_path)
    assert found.names == ("adam", "zoe")
    assert found.sizes().tolist() == [4, 4]
    with pytest.raises(DataError, match=r"has no images; expected CLASS/FILE with a suffix such as .png"):
        federation(sources.Images("phones"), IID, folder=tmp_path)


def test_images_that_cannot_be_used(tmp_path: Path) -> None:
    write_images(tmp_path / "images", ["cat"], 2)
    Image.new("RGB", (9, 4)).save(tmp_path / "images/cat/z.png")
    with pytest.raises(DataError, match=r"z.png has the size \[4, 9\], and .*0.png has \[4, 5\], .* size = \[4, 5\]"):
        federation(sources.Images("images"), IID, folder=tmp_path)
    (tmp_path / "images/cat/z.png").write_text("no pixels")
    with pytest.raises(DataError, match=r"z.png cannot be decoded as an image: cannot identify image file"):
        federation(sources.Images("images"), IID, folder=tmp_path)


def test_hugging_face_images_and_class_labels(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 6)).astype(np.uint8)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    columns: dict[str, list[Any]] = {"image": [Image.fromarray(each) for each in pixels], "label": [1, 0, 1, 0]}
    datasets.Dataset.from_dict(columns, features).select([3, 1, 0]).save_to_disk(str(tmp_path / "saved"))
    found = federation(sources.HuggingFace("saved", scale="unit", test_fraction=0.0), IID, folder=tmp_path)
    np.testing.assert_allclose(found.inputs, pixels[[3, 1, 0], None] / 255.0, atol=1e-7)
    assert found.targets.tolist() == [0, 0, 1]
    assert found.classes == ("cat", "dog")
    columns["label"][2] = -1
    columns["image"][0] = None
    datasets.Dataset.from_dict(columns, features).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=r"saved, train, row 3: there is no label \(-1\); use another split"):
        federation(sources.HuggingFace("saved"), IID, folder=tmp_path)
    columns["label"][2] = 0
    datasets.Dataset.from_dict(columns, features).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=r"saved, train, row 1: there is no image; leave the row out"):
        federation(sources.HuggingFace("saved"), IID, folder=tmp_path)


def test_hugging_face_folders_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    (tmp_path / "folder").mkdir()
    table_file(tmp_path / "folder", "parquet", "train", ROWS)
    table_file(tmp_path / "folder", "parquet", "test", ROWS[:1])
    source = sources.HuggingFace("folder", inputs=FEATURES, targets="label")
    found = federation(source, BY_USER, folder=tmp_path)
    assert found.names == ("a", "b", "c")
    np.testing.assert_array_equal(found.inputs, [[1, 0.5], [2, 1.5], [3, 2.5], [4, 3.5]])
    assert found.test_targets.tolist() == [1]

    asked: list[object] = []

    def load_dataset(name: str, config: str | None, revision: str | None) -> Any:
        asked.append((name, config, revision))
        if name == "no/such":
            raise ConnectionError("Couldn't reach 'no/such' on the Hub\n(more lines)")
        return datasets.DatasetDict({"train": datasets.Dataset.from_parquet(str(tmp_path / "folder/train.parquet"))})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    hub = sources.HuggingFace(name="someone/people", config="small", inputs="age", targets="label")
    assert federation(hub, BY_USER, folder=tmp_path).names
    assert asked == [("someone/people", "small", None)]
    with pytest.raises(DataError, match=r"no/such cannot be loaded as a data set of the .* Hub: Couldn't reach"):
        federation(sources.HuggingFace(name="no/such"), IID, folder=tmp_path)


def test_folders_that_datasets_cannot_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    for name in ("folder", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "folder" / "train.parquet").write_text("age,label")
    datasets.Dataset.from_dict({"image": [], "label": []}).save_to_disk(str(tmp_path / "saved"))
    for name, words in (
        ("folder", "folder cannot be loaded as a folder with a data set: Parquet magic bytes not found"),
        ("empty", "empty cannot be loaded as a folder with a data set: "),
        ("saved", "saved cannot be loaded as a folder with a data set: "),
    ):
        with pytest.raises(DataError, match=words):
            federation(sources.HuggingFace(name), IID, folder=tmp_path)


def test_leaf_mistakes_name_the_user(tmp_path: Path) -> None:
    (tmp_path / "leaf/train").mkdir(parents=True)
    for users, words in (
        ({"u": ([[1.0], [float("nan")]], [1, 2])}, r"not a LEAF file"),
        ({"u": ([[1.0]], [1]), "v": ([[1.0, 2.0]], [1])}, r"a.json, user 'v', row 1: x is float32\[2\], and that of"),
        ({"u": ([[1.0]], [1]), "v": (["text"], [1])}, r"user 'v', row 1: x is uint8\[4\]"),
    ):
        data = {name: {"x": x, "y": y} for name, (x, y) in users.items()}
        text = json.dumps({"users": list(data), "num_samples": [], "user_data": data})
        (tmp_path / "leaf/train/a.json").write_text(text)
        with pytest.raises(DataError, match=words):
            federation(sources.Leaf("leaf"), None, folder=tmp_path)


def test_packages_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table_file(tmp_path, "csv")
    write_images(tmp_path / "images", ["cat"], 1)
    for module, source, words in (
        ("pyarrow", table_source("csv"), r"pip install 'pyarrow>="),
        ("PIL", sources.Images("images"), r"pip install 'pillow>="),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(__import__("sys").modules, module, None)
            with pytest.raises(MissingExtraError, match=words):
                federation(source, IID, folder=tmp_path)


JOB = """
name = "people"
population = "demo"
trainer = "people"
rounds = 6
model = { initial = "people:features" }
config = { epochs = 2, batch_size = 8, learning_rate = 0.5 }
selection = { goal = 3, over_selection = 1.0 }
[simulation]
engine = "loop"
"""
CLIENTS = ("east", "inner", "north", "outer", "south", "west")
MODULE = """
from torch import nn

def features(): return nn.Linear(3, 2)
def pixels(): return nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
"""
PAGE = (Path(__file__).resolve().parents[3] / "docs" / "simulation.md").read_text("utf-8")
TABLES = dict(re.findall(r"<!-- data: (\w+) -->\n```toml\n(.*?)```", PAGE, flags=re.DOTALL))


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same examples in files of every kind: two classes that a line separates, six users."""
    import datasets

    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("examples")
    rng = np.random.default_rng(1)
    x = rng.normal(size=(240, 3)).astype(np.float32)
    y, hospital = np.where(x @ [1.0, -2.0, 0.5] > 0, "well", "ill"), np.array(CLIENTS)[np.arange(240) % 6]
    header = ("age", "bmi", "bp", "diagnosis", "hospital")
    rows = [(*map(float, row), str(y[at]), str(hospital[at])) for at, row in enumerate(x)]
    write_csv(folder / "patients.csv", header, rows)
    datasets.Dataset.from_csv(str(folder / "patients.csv"), cache_dir=str(folder)).save_to_disk(str(folder / "saved"))
    np.savez(folder / "patients.npz", x=x, y=y, hospital=hospital)
    for name, array in {"x": x, "y": y, "hospital": hospital}.items():
        np.save(folder / f"{name}.npy", array)
    numbers = (y == "well").astype(int)
    users = {name: (x[hospital == name].tolist(), numbers[hospital == name].tolist()) for name in CLIENTS}
    write_leaf(folder / "leaf", users)
    (folder / "hospitals").mkdir()
    for name in CLIENTS:
        with PackedWriter(folder / "silos" / name) as packed:
            packed.add(x[hospital == name], numbers[hospital == name])
        write_parquet(folder / "hospitals" / f"{name}.parquet", header, [row for row in rows if row[-1] == name])
        write_images(folder / "photos" / name, ["ill", "well"], 20, bright=True)
    (folder / "people.py").write_text(MODULE)
    return folder


@pytest.mark.parametrize("kind", TABLES)
def test_a_simulation_learns_from_each_source_on_the_page(kind: str, examples: Path) -> None:
    changes = ['model.initial="people:pixels"'] if kind == "images" else []
    run = simulate(parse(JOB + TABLES[kind], examples, changes))
    assert run.federation is not None
    assert run.federation.names == CLIENTS
    assert run.summary.last is not None
    assert run.summary.last.value > 0.9
    expected = ["ill", "well"] if kind not in ("leaf", "packed") else None  # these have targets of numbers
    assert json.loads(run.to_json()).get("classes") == expected
    assert any(line.startswith("  well  ") for line in report.lines(run.federation, 80)) == (expected is not None)


def test_the_page_has_every_source_and_partition() -> None:
    assert set(TABLES) == set(sources.SOURCES) - {"digits", "mnist", "shakespeare", "function"}
    for name in (*sources.SOURCES, *partitioners.PARTITIONS):
        assert re.search(rf"^\|.*`{name}`.*\|", PAGE, flags=re.MULTILINE), name


def test_the_message_on_the_page_is_printed(examples: Path, tmp_path: Path) -> None:
    lines = (examples / "patients.csv").read_text().splitlines()
    lines[7] = "," + lines[7].partition(",")[2]
    (tmp_path / "patients.csv").write_text("\n".join(lines))
    with pytest.raises(DataError) as caught:
        simulate(parse(JOB + TABLES["csv"], tmp_path))
    assert str(caught.value).removeprefix(f"{tmp_path}/") in PAGE


def test_options_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    for data, words in (
        ('{ source = "huggingface" }', "simulation.data.path and name: expected either the path of a folder or a name"),
        ('{ source = "csv", path = "a", inputs = "a", targets = "b", delimiter = "ab" }', "delimiter = 'ab': expected"),
        ('{ source = "npy", inputs = "a", targets = "b", test_inputs = "c" }', "expected both files, or neither"),
        ('{ source = "csv", inputs = 3, path = "a" }', "simulation.data.targets: this key is required and missing"),
        ('{ source = "csv", inputs = 3, path = "a" }', "simulation.data.inputs = 3: expected text or"),
        ('{ source = "images", path = "a", channels = 2 }', "simulation.data.channels = 2: expected one of 0, 1, 3"),
        ('{ source = "cvs" }', "did you mean csv"),
    ):
        with pytest.raises(JobFileError, match=words):
            parse(f"{JOB}data = {data}", tmp_path)
