"""`fedplat data`: pack examples into a few large files, and check them."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import typer

from fedplat.cli import formats, options, session
from fedplat.command_line.with_typer import make_group
from fedplat.config import user_code
from fedplat.errors import DataError
from fedplat.packed import PackedIndex, PackedReader, PackedWriter

app = make_group("Pack training data into a few large files.")

Array: TypeAlias = npt.NDArray[Any]
Pairs: TypeAlias = Iterator[tuple[Array, Array]]
_ROWS_AT_ONCE = 1024


@app.command()
def pack(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A map-style dataset of (input, target) pairs, or a function that creates one, as module:name or "
            "/path/to/file.py:name; or a folder with the arrays inputs.npy and targets.npy, or with .npz files that "
            "have both arrays, in the order of their names.",
        ),
    ],
    out: Annotated[Path, typer.Option("--dir", metavar="DIR", help="New folder for the packed data.")],
    shard_mb: Annotated[float, typer.Option(min=0.001, max=65536, metavar="MB", help="Size of a file, in MiB.")] = 64,
    inputs: Annotated[str, typer.Option(metavar="NAME", help="Name of the array of inputs.")] = "inputs",
    targets: Annotated[str, typer.Option(metavar="NAME", help="Name of the array of targets.")] = "targets",
    as_json: options.JsonOption = False,
) -> None:
    """Pack examples into Arrow files.

    All inputs must have one shape and one type of numbers, and so must all targets. FOLDER appears when it is complete;
    its index names the SHA-256 of each file. It is read by fedplat.pytorch.packed.PackedDataset.
    """
    with session.reporting(context, as_json) as output:
        total, pairs = _open_source(source, inputs, targets)
        try:
            with output.steps("packing") as progress, PackedWriter(out, int(shard_mb * 2**20)) as writer:
                for some_inputs, some_targets in pairs:
                    writer.add(some_inputs, some_targets)
                    progress(writer.num_rows, max(total, writer.num_rows))
        except OSError as exc:
            output.error(f"{out} cannot be written: {exc.strerror or exc}")
            raise typer.Exit(session.FAILED) from exc
        index = PackedReader(out).index
        if output.as_json:
            output.json(_facts(index, out))
            return
        files = f"{len(index.shards)} file{'s' if len(index.shards) > 1 else ''}"
        output.line(f"packed {index.num_rows:,} examples ({formats.size(index.size_bytes)}) into {files}: {out}")


@app.command()
def check(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of packed data.")],
    as_json: options.JsonOption = False,
) -> None:
    """Read all packed data, and compare each file with its digest."""
    with session.reporting(context, as_json) as output:
        reader = PackedReader(folder)
        with output.steps("checking") as progress:
            reader.verify(progress)
        if output.as_json:
            output.json(_facts(reader.index, folder))
            return
        index = reader.index
        output.line(
            f"{folder}: {index.num_rows:,} examples ({formats.size(index.size_bytes)}), inputs {index.inputs}, targets "
            f"{index.targets}; all {len(index.shards)} files are as the index describes"
        )


def _facts(index: PackedIndex, folder: Path) -> dict[str, object]:
    columns = {
        name: {"dtype": column.dtype, "shape": list(column.shape)}
        for name, column in (("inputs", index.inputs), ("targets", index.targets))
    }
    counts = {"examples": index.num_rows, "files": len(index.shards), "size_bytes": index.size_bytes}
    return {"path": str(folder), "dataset": index.dataset, **counts, **columns}


def _open_source(source: str, inputs: str, targets: str) -> tuple[int, Pairs]:
    """Return the number of examples, 0 if it is unknown, and the examples in parts. Raises `DataError`."""
    folder = Path(source)
    if not folder.is_dir():
        if ":" not in source:
            raise DataError(f"there is no folder {source}; expected a folder, module:name or /path/to/file.py:name")
        dataset = _load_dataset(source)
        return len(dataset), _read_dataset(dataset, source)
    paths = [folder / f"{name}.npy" for name in (inputs, targets)]
    if all(path.is_file() for path in paths):
        arrays = [_load(path, partial(np.load, path, mmap_mode="r", allow_pickle=False)) for path in paths]
        _check_rows(folder, arrays)
        return len(arrays[0]), _in_parts(arrays[0], arrays[1])
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise DataError(f"{folder} has neither {inputs}.npy and {targets}.npy nor .npz files")
    return 0, _read_archives(files, inputs, targets)


def _load_dataset(source: str) -> Any:
    found = user_code.load(source)
    is_dataset = hasattr(found, "__getitem__") and hasattr(found, "__len__") and not isinstance(found, type)
    dataset = found if is_dataset or not callable(found) else user_code.call(source, Path())
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{source} is a {type(dataset).__name__}; expected a dataset with __len__ and __getitem__, or a function "
            "without arguments that returns one"
        )
    return dataset


def _read_dataset(dataset: Any, source: str) -> Pairs:
    for start in range(0, len(dataset), _ROWS_AT_ONCE):
        with user_code.wrap_errors(f"reading {source}"):
            pairs = [dataset[index] for index in range(start, min(start + _ROWS_AT_ONCE, len(dataset)))]
        # One by one: examples of different shapes or types must not be converted to a common one.
        for number, pair in enumerate(pairs, start):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise DataError(f"{source}: example {number:,} is a {type(pair).__name__}; expected (input, target)")
            try:
                one, target = (np.asarray(value) for value in pair)
            except (TypeError, ValueError, RuntimeError) as exc:  # a type that NumPy lacks, a tensor with a gradient
                raise DataError(f"{source}: example {number:,} is not a pair of arrays: {exc}") from exc
            yield one[np.newaxis], target[np.newaxis]


def _read_archives(files: list[Path], inputs: str, targets: str) -> Pairs:
    for path in files:
        arrays = _load(path, partial(_read_archive, path, (inputs, targets)))
        _check_rows(path, arrays)
        yield arrays[0], arrays[1]


def _read_archive(path: Path, names: tuple[str, str]) -> list[Array]:
    with open(path, "rb") as file:  # `np.load` leaves a damaged archive open
        archive: Any = np.load(file, allow_pickle=False)
        found = getattr(archive, "files", [])
        if missing := [name for name in names if name not in found]:
            raise DataError(f"{path} has no array {missing[0]!r}; it has {', '.join(found[:20]) or 'none'}")
        return [archive[name] for name in names]


def _check_rows(path: Path, arrays: list[Array]) -> None:
    if not all(array.ndim for array in arrays) or len(arrays[0]) != len(arrays[1]):
        shapes = " and ".join(str(list(array.shape)) for array in arrays)
        raise DataError(f"{path}: the arrays have the shapes {shapes}; expected as many rows in both")


def _in_parts(inputs: Array, targets: Array) -> Pairs:
    for start in range(0, len(inputs), _ROWS_AT_ONCE):
        yield inputs[start : start + _ROWS_AT_ONCE], targets[start : start + _ROWS_AT_ONCE]


def _load(path: Path, read: Callable[[], Any]) -> Any:
    """Read a NumPy file, without objects. Raises `DataError` that names the file."""
    try:
        return read()
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as exc:
        raise DataError(f"{path} cannot be read: {exc}") from exc
