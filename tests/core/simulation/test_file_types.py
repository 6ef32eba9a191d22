"""Types of tables: ids and named classes are texts as in the file, and all files of a table have one type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedplat.errors import DataError
from fedplat.simulation.data import federation, partitioners, sources
from support.simulation.tables import write_leaf, write_parquet

ALL = partitioners.Iid(clients=1)


@pytest.mark.parametrize(
    "ids",
    [
        ["007", "07", "7"],
        ["10000000000000000001", "10000000000000000002", "10000000000000000003"],
        ["1000", "1e3", "20"],
        ["NA", "SA", "nan"],
        ["FALSE", "False", "false"],
        ["4", "30", "100"],
        ["1.5", "1.50", "10"],
    ],
)
def test_ids_are_texts_as_in_the_file(ids: list[str], tmp_path: Path) -> None:
    for name, some in (("a", ids[:2]), ("b", ids[2:])):  # of other types, if each file had its own
        (tmp_path / f"{name}.csv").write_text("x,y,who\n" + "".join(f"1,0,{each}\n" for each in some))
    source = sources.Csv(path="*.csv", inputs="x", targets="y", test_fraction=0.0)
    found = federation(source, partitioners.Column(column="who"), folder=tmp_path)
    assert found.names == tuple(ids)
    assert [part.tolist() for part in found.parts] == [[0], [1], [2]]


@pytest.mark.parametrize("classes", [["01", "02"], ["false", "true"], ["NA", "SA"], ["1", "1.0"], ["True", "False"]])
def test_named_classes_are_texts_as_in_the_file(classes: list[str], tmp_path: Path) -> None:
    written = ["true", "false"] if classes[0] == "True" else classes  # as the types of earlier versions were printed
    (tmp_path / "people.csv").write_text("x,y\n" + "".join(f"1,{each}\n" for each in written))
    source = sources.Csv(path="people.csv", inputs="x", targets="y", classes=classes, test_fraction=0.0)
    found = federation(source, ALL, folder=tmp_path)
    assert found.targets.tolist() == [0, 1]
    assert found.classes == tuple(classes)


@pytest.mark.parametrize(
    ("files", "targets"),
    [
        (["0 1", "0.0 1.0"], np.array([0, 1, 0, 1])),
        (["10 12", "9.5 11"], np.array([[10], [12], [9.5], [11]], np.float32)),
        (["0.5 1", "2 3"], np.array([[0.5], [1], [2], [3]], np.float32)),
        (["1 2", "2 3b"], np.array([0, 1, 1, 2])),
        (["true false", "0 1"], np.array([1, 0, 0, 1])),
    ],
)
@pytest.mark.parametrize("is_test", [False, True])
def test_types_are_those_of_all_files(files: list[str], targets: np.ndarray, is_test: bool, tmp_path: Path) -> None:
    for name, written in zip("ab", files, strict=True):
        (tmp_path / f"{name}.csv").write_text("x,y\n" + "".join(f"1,{each}\n" for each in written.split()))
    source = sources.Csv(
        path="a.csv" if is_test else "*.csv",
        test_path="b.csv" if is_test else "",
        inputs="x",
        targets="y",
        test_fraction=0.0,
        classes=["1", "2", "3b"] if "3b" in files[1] else [],
    )
    found = federation(source, ALL, folder=tmp_path)
    whole = np.concatenate([found.targets, found.test_targets])
    assert whole.dtype == targets.dtype
    np.testing.assert_array_equal(whole, targets)


def test_types_of_parquet_files_that_do_not_fit(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ("x", "y", "who"), [(1, 1, 10**17 + 1), (1, 2, 7)])
    write_parquet(tmp_path / "b.parquet", ("x", "y", "who"), [(1, 1, 7.0)])
    source = sources.Parquet(path="*.parquet", inputs="x", targets="y", test_fraction=0.0)
    found = federation(source, partitioners.Column(column="who"), folder=tmp_path)
    assert found.names == ("7", str(10**17 + 1))  # float64 has no such number
    write_parquet(tmp_path / "b.parquet", ("x", "y", "who"), [(1, "1b", 7)])
    with pytest.raises(DataError, match=r"a.parquet has int64 in column 'y', and .*b.parquet texts; expected one type"):
        federation(source, ALL, folder=tmp_path)


def test_files_of_one_name_in_different_folders_are_different_clients(tmp_path: Path) -> None:
    for hospital in ("north", "south"):
        (tmp_path / hospital).mkdir()
        (tmp_path / hospital / "data.CSV").write_text("x,y\n1,0\n2,1\n")
    (tmp_path / "@eaDir").mkdir()
    (tmp_path / "@eaDir/data.CSV").write_text("x,y\n9,9\n")
    source = sources.Csv(path="*/data.CSV", inputs="x", targets="y", test_fraction=0.0)
    found = federation(source, partitioners.Column(column="file"), folder=tmp_path)
    assert found.names == ("north/data", "south/data")
    one = sources.Csv(path="north", inputs="x", targets="y", test_fraction=0.0)
    assert len(federation(one, ALL, folder=tmp_path).inputs) == 2


@pytest.mark.parametrize("source", ["csv", "parquet"])
def test_whole_inputs_are_exact(source: str, tmp_path: Path) -> None:
    tokens = [2**24 + 1, 2**53 + 1]
    if source == "csv":
        (tmp_path / "a.csv").write_text("x,z,y\n" + "".join(f"{each},1,0\n" for each in tokens))
        kind: type[sources.Csv | sources.Parquet] = sources.Csv
    else:
        write_parquet(tmp_path / "a.parquet", ["x", "z", "y"], [[each, 1.0, 0] for each in tokens])
        kind = sources.Parquet
    found = federation(
        kind(path=f"a.{source}", inputs=["x", "z"], targets="y", dtype="int64", test_fraction=0.0), ALL, folder=tmp_path
    )
    assert found.inputs.tolist() == [[tokens[0], 1], [tokens[1], 1]]


@pytest.mark.parametrize("number", [str(10**19), str(10**20), "1.5"])
def test_what_is_no_whole_number_of_64_bits_is_refused(number: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"x,y\n1,0\n{number},0\n")
    source = sources.Csv(path="a.csv", inputs="x", targets="y", dtype="int64", test_fraction=0.0)
    with pytest.raises(DataError, match=r"a.csv, row 2: .* is not a whole number of 64 bits"):
        federation(source, ALL, folder=tmp_path)


def test_a_target_like_na_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,SA\n2,NA\n")
    source = sources.Csv(path="a.csv", inputs="x", targets="y", test_fraction=0.0)
    with pytest.raises(DataError, match=r"row 2: 'NA' in column 'y' stands for a missing value; .* classes = \["):
        federation(source, ALL, folder=tmp_path)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (["007 7"], r"a.csv, row 2: '7' in column 'y' would be the same class as '007'; name all classes"),
        (["8 7", "1 007"], r"b.csv, row 2: '007' in column 'y' would be the same class as '7'"),
        (["7.0 8", "1 07"], r"b.csv, row 2: '07' in column 'y' would be the same class as '7.0'"),
        (["16 0x10"], r"row 1: '16' in column 'y' would be the same class as '0x10'"),
        (["1 12345678901234567890"], r"row 2: '12345678901234567890' in column 'y' is no whole number of 64 bits"),
        (["1 2", "1 9223372036854775808"], r"b.csv, row 2: '9223372036854775808' in column 'y' is no whole number"),
    ],
)
@pytest.mark.parametrize("is_test", [False, True])
def test_targets_that_would_become_one_are_refused(
    files: list[str], problem: str, is_test: bool, tmp_path: Path
) -> None:
    for name, written in zip("ab", [*files, "1 2"], strict=False):
        (tmp_path / f"{name}.csv").write_text("x,y\n" + "".join(f"1,{each}\n" for each in written.split()))
    source = sources.Csv(
        path="a.csv" if is_test else "*.csv", test_path="b.csv" * is_test, inputs="x", targets="y", test_fraction=0.0
    )
    with pytest.raises(DataError, match=problem):
        federation(source, ALL, folder=tmp_path)


@pytest.mark.parametrize("written", ["00 01 02", "1e19 1.5", "1.0 1 01.5", "false False", "-1 +2"])
def test_targets_that_keep_their_differences_are_numbers(written: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"1,{each}\n" for each in written.split()))
    source = sources.Csv(path="a.csv", inputs="x", targets="y", test_fraction=0.0)
    assert not federation(source, ALL, folder=tmp_path).classes


@pytest.mark.parametrize("number", [2**24 + 1, -(2**24) - 1, 2**53 + 1, 12345678901234567890])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_whole_inputs_that_float32_would_round_are_refused(number: int, suffix: str, tmp_path: Path) -> None:
    if suffix == "csv":
        (tmp_path / "a.csv").write_text(f"x,z,y\n1,1,0\n{number},1,0\n")
    else:
        kind_of = np.uint64 if number > 2**63 else np.int64
        write_parquet(tmp_path / "a.parquet", ["x", "z", "y"], [[kind_of(each), 1.0, 0] for each in (1, number)])
    kind = sources.Csv if suffix == "csv" else sources.Parquet
    options: dict[str, Any] = {"path": f"a.{suffix}", "inputs": ["x", "z"], "targets": "y", "test_fraction": 0.0}
    with pytest.raises(
        DataError, match=rf"a.{suffix}, row 2: {number} in column 'x' would be rounded to float32; .*int64"
    ):
        federation(kind(**options), ALL, folder=tmp_path)
    assert federation(kind(**options, dtype="float32"), ALL, folder=tmp_path).inputs.dtype == np.float32


@pytest.mark.parametrize("number", [2**24 + 1, -(2**24) - 1, 2**53 + 1, 12345678901234567890])
def test_whole_inputs_of_leaf_that_float32_would_round_are_refused(number: int, tmp_path: Path) -> None:
    write_leaf(tmp_path / "leaf", {"anna": ([[1, 1], [2, number]], [0, 1])})
    expected = rf"data.json, user 'anna', row 2: {number} in x would be rounded to float32; .*int64"
    with pytest.raises(DataError, match=expected):
        federation(sources.Leaf("leaf", test_fraction=0.0), ALL, folder=tmp_path)
    rounded = federation(sources.Leaf("leaf", test_fraction=0.0, dtype="float32"), ALL, folder=tmp_path)
    assert rounded.inputs.dtype == np.float32
    if abs(number) < 2**63:
        exact = federation(sources.Leaf("leaf", test_fraction=0.0, dtype="int64"), ALL, folder=tmp_path)
        assert exact.inputs.tolist() == [[1, 1], [2, number]]


@pytest.mark.parametrize("number", [2**24 + 1, 2**53 + 1, 10**20 + 1])
def test_one_of_several_targets_that_float32_would_round_is_refused(number: int, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"x,y,z\n1,5,0.5\n1,{number},0.5\n")
    options: dict[str, Any] = {"path": "a.csv", "inputs": "x", "test_fraction": 0.0}
    expected = rf"a.csv, row 2: {number} in column 'y' would be rounded to float32, as several targets are"
    with pytest.raises(DataError, match=expected):
        federation(sources.Csv(**options, targets=["y", "z"]), ALL, folder=tmp_path)
    (tmp_path / "a.csv").write_text(f"x,y,z\n1,5,0.5\n1,{number}.0,0.5\n")  # a quantity
    assert federation(sources.Csv(**options, targets=["y", "z"]), ALL, folder=tmp_path).targets.dtype == np.float32


def test_inputs_that_float32_holds_need_no_dtype(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"x,z,y\n{2**24},1e20,0\n{2**30},1.5,0\n")
    source = sources.Csv(path="a.csv", inputs=["x", "z"], targets="y", test_fraction=0.0)
    found = federation(source, ALL, folder=tmp_path).inputs
    assert found[:, 0].tolist() == [2**24, 2**30]


def test_a_target_of_parquet_beyond_int64_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["x", "y"], [[1, np.uint64(2**63 + 1)], [1, np.uint64(3)]])
    source = sources.Parquet(path="a.parquet", inputs="x", targets="y", test_fraction=0.0)
    with pytest.raises(DataError, match=r"a.parquet, row 1: .*9223372036854775809"):
        federation(source, ALL, folder=tmp_path)
