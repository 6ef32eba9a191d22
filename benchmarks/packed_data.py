"""Compare formats of packed examples, and one small file per example, by the examples read in a second.

    python benchmarks/packed_data.py [--images 100000] [--tokens 10000] [--json] [--save]

Images are 28x28 bytes with a class; rows of tokens are 512 int32 (2 kB) with a class. All formats have shards of 16 MB
without compression, files are in the page cache, and every read ends with two arrays for the batch. Formats whose
package is not installed are not measured; `pip install webdataset mosaicml-streaming`, in an environment of its own,
adds them. A second table shows what reading ahead saves.
"""

from __future__ import annotations

import importlib.util
import itertools
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import typer
from typing_extensions import override

from fedplat.packed import PackedReader, PackedWriter
from report import Cell, JsonOption, Report, SaveOption, finish

if TYPE_CHECKING:
    from fedplat.pytorch.packed import TensorPair

SHARD_BYTES = 16 * 2**20
SECONDS, PARTS = 0.3, 3
"""How long each reading is measured, and how often."""
Array = np.ndarray[Any, Any]
Pair = tuple[Array, Array]
NOTES = (
    "Examples a second of one process with one thread, from the page cache, the median of three parts; measured on two "
    "cores that other work used, too. Opening includes the first example and what the package imports for it, in "
    "Parquet's case pandas. Memory is the growth of the process's own memory by all readings, without pages of mapped "
    "files. In order: batches of 256. Parquet has groups of 1,000 examples; smaller ones help access by index. "
    "WebDataset has no access by index. MDS was measured by its class LocalDataset, with an empty stand-in for "
    "torchvision.",
)


class Format(ABC):
    """A way to store examples."""

    module: ClassVar[str] = ""
    has_index: ClassVar[bool] = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def write(self, inputs: Array, targets: Array) -> None:
        """Write all examples."""

    @abstractmethod
    def open(self) -> Callable[[Array], Pair]:
        """Return the function that reads a batch by index."""

    def in_order(self, batches: Iterable[Array]) -> Iterator[Pair]:
        """Yield all examples in batches."""
        return map(self.open(), batches)


class Files(Format):
    """One `.npy` file for each example."""

    @override
    def write(self, inputs: Array, targets: Array) -> None:
        for number, (one, target) in enumerate(zip(inputs, targets, strict=True)):
            if number % 1000 == 0:
                (self.folder / str(number // 1000)).mkdir()
            np.save(self.folder / str(number // 1000) / f"{number % 1000}-{target}.npy", one)

    @override
    def open(self) -> Callable[[Array], Pair]:
        paths = dict[int, tuple[str, int]]()
        for folder in os.scandir(self.folder):
            for file in os.scandir(folder.path):
                number, _, target = file.name.removesuffix(".npy").partition("-")
                paths[int(folder.name) * 1000 + int(number)] = file.path, int(target)

        def read(indices: Array) -> Pair:
            found = [paths[index] for index in indices.tolist()]
            return np.stack([np.load(path, allow_pickle=False) for path, _ in found]), np.array(
                [target for _, target in found]
            )

        return read


class Arrow(Format):
    """The shards of `fedplat data pack`: Arrow IPC files, mapped into memory."""

    module = "pyarrow"

    @override
    def write(self, inputs: Array, targets: Array) -> None:
        with PackedWriter(self.folder, SHARD_BYTES) as writer:
            writer.add(inputs, targets)

    @override
    def open(self) -> Callable[[Array], Pair]:
        return PackedReader(self.folder).read


class Parquet(Format):
    """Parquet files with row groups of 1,000 examples; a group is decoded for each example of a batch in it."""

    module = "pyarrow"

    @override
    def write(self, inputs: Array, targets: Array) -> None:
        import pyarrow
        import pyarrow.parquet

        rows = SHARD_BYTES // inputs[0].nbytes
        for number, start in enumerate(range(0, len(inputs), rows)):
            part = inputs[start : start + rows]
            binary = pyarrow.FixedSizeBinaryArray.from_buffers(
                pyarrow.binary(inputs[0].nbytes), len(part), [None, pyarrow.py_buffer(part.tobytes())]
            )
            table = pyarrow.table({"inputs": binary, "targets": targets[start : start + rows]})
            pyarrow.parquet.write_table(
                table, self.folder / f"{number:05}.parquet", 1000, compression="none", use_dictionary=False
            )
        self._kind, self._shape = inputs.dtype, inputs.shape[1:]

    @override
    def open(self) -> Callable[[Array], Pair]:
        import pyarrow.parquet

        files = [
            pyarrow.parquet.ParquetFile(path, memory_map=True, pre_buffer=False)
            for path in sorted(self.folder.iterdir())
        ]
        groups = [(file, group) for file in files for group in range(file.num_row_groups)]
        ends = np.cumsum([file.metadata.row_group(group).num_rows for file, group in groups])

        def read(indices: Array) -> Pair:
            inputs, targets = np.empty((len(indices), *self._shape), self._kind), np.empty(len(indices), np.int64)
            places = np.searchsorted(ends, indices, side="right")
            for place in np.unique(places):
                file, group = groups[place]
                table = file.read_row_group(group, use_threads=False)
                chosen = places == place
                local = indices[chosen] - (ends[place] - table.num_rows)
                column = table.column("inputs").combine_chunks()
                values = np.frombuffer(column.buffers()[1], self._kind).reshape(-1, *self._shape)
                inputs[chosen], targets[chosen] = values[local], table.column("targets").to_numpy()[local]
            return inputs, targets

        return read


class Mds(Format):
    """MDS, the format of MosaicML Streaming."""

    module = "streaming"

    @override
    def write(self, inputs: Array, targets: Array) -> None:
        streaming: Any = importlib.import_module("streaming")
        kind = f"ndarray:{inputs.dtype}:{','.join(map(str, inputs.shape[1:]))}"
        shutil.rmtree(self.folder)
        columns = {"inputs": kind, "targets": "int"}
        with streaming.MDSWriter(out=str(self.folder), columns=columns, size_limit=SHARD_BYTES) as writer:
            for one, target in zip(inputs, targets, strict=True):
                writer.write({"inputs": one, "targets": int(target)})

    @override
    def open(self) -> Callable[[Array], Pair]:
        streaming: Any = importlib.import_module("streaming")
        dataset = streaming.LocalDataset(str(self.folder))

        def read(indices: Array) -> Pair:
            found = [dataset[index] for index in indices.tolist()]
            return np.stack([one["inputs"] for one in found]), np.array([one["targets"] for one in found])

        return read


class WebDataset(Format):
    """WebDataset: tar files with a `.npy` and a `.cls` for each example."""

    module = "webdataset"
    has_index = False

    @override
    def write(self, inputs: Array, targets: Array) -> None:
        webdataset: Any = importlib.import_module("webdataset")
        with webdataset.ShardWriter(str(self.folder / "%05d.tar"), maxsize=SHARD_BYTES, verbose=0) as writer:
            for number, (one, target) in enumerate(zip(inputs, targets, strict=True)):
                writer.write({"__key__": f"{number:08}", "npy": one, "cls": int(target)})

    @override
    def open(self) -> Callable[[Array], Pair]:
        rest = self.in_order(itertools.repeat(np.arange(1)))
        return lambda indices: next(rest)

    @override
    def in_order(self, batches: Iterable[Array]) -> Iterator[Pair]:
        webdataset: Any = importlib.import_module("webdataset")
        files = [str(path) for path in sorted(self.folder.iterdir())]
        examples = iter(webdataset.WebDataset(files, shardshuffle=False).decode().to_tuple("npy", "cls"))
        for indices in batches:
            if not (found := list(itertools.islice(examples, len(indices)))):
                return
            yield np.stack([one for one, _ in found]), np.array([target for _, target in found])


FORMATS: dict[str, type[Format]] = {
    "Arrow IPC, mapped": Arrow,
    "Parquet": Parquet,
    "MDS": Mds,
    "WebDataset": WebDataset,
    "one file per example": Files,
}


def main(
    images: Annotated[int, typer.Option(min=1000, help="Number of images.")] = 100_000,
    tokens: Annotated[int, typer.Option(min=1000, help="Number of rows of tokens.")] = 10_000,
    as_json: JsonOption = False,
    save: SaveOption = False,
) -> None:
    """Measure all formats, and reading ahead."""
    rng = np.random.default_rng(0)
    data = {
        "images": rng.integers(0, 255, (images, 28, 28)).astype(np.uint8),
        "tokens": rng.integers(0, 50_000, (tokens, 512)).astype(np.int32),
    }
    rows: list[tuple[Cell, ...]] = []
    for name, kind in FORMATS.items():
        if kind.module and importlib.util.find_spec(kind.module) is None:
            rows.append((name, *[None] * 8))
            continue
        on_images, on_tokens = (measured(kind, inputs) for inputs in data.values())
        rows.append((name, *on_images, *on_tokens[2:]))
    speeds = ("by index, batches of 32", "by index, batches of 256", "in order")
    columns = ("format", "opening, ms", "memory, MB", *(f"{kind} {each}" for kind in data for each in speeds))
    report = Report(name="packed_data", title="Packed data", columns=columns, rows=tuple(rows), notes=NOTES)
    finish(report, as_json, save, parts={"prefetch": measure_prefetch(data["tokens"])})


def measured(kind: type[Format], inputs: Array) -> tuple[Cell, ...]:
    """Write the examples, and measure a format in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as temporary, ProcessPoolExecutor(1, spawn) as process:
        store = kind(Path(temporary) / "data")
        store.folder.mkdir()
        store.write(inputs, np.arange(len(inputs)) % 10)
        return process.submit(measure, store, len(inputs)).result()


def measure(store: Format, count: int) -> tuple[Cell, ...]:
    """Return the milliseconds of opening, the growth of memory in MB, and examples a second."""
    rng = np.random.default_rng(1)
    if store.module:
        importlib.import_module(store.module)
    began = time.perf_counter()
    read = store.open()
    read(np.array([0]))
    opening, before = time.perf_counter() - began, own_memory()
    by_index: list[Cell] = [
        rate(map(read, shuffled(count, size, rng))) if store.has_index else "no index" for size in (32, 256)
    ]
    whole = [np.arange(start, min(start + 256, count)) for start in range(0, count, 256)]
    in_order = rate(store.in_order(whole))
    return opening * 1000, (own_memory() - before) / 1e6, *by_index, in_order


def shuffled(count: int, size: int, rng: np.random.Generator) -> Iterator[Array]:
    """Yield batches of random examples, endlessly."""
    while True:
        order = rng.permutation(count)
        yield from (order[start : start + size] for start in range(0, count - size + 1, size))


def rate(batches: Iterator[Pair]) -> float:
    """Return the examples a second, the median of parts."""
    rates = list[float]()
    while len(rates) < PARTS:
        began, done = time.perf_counter(), 0
        for _, targets in batches:
            done += len(targets)
            if time.perf_counter() - began > SECONDS:
                break
        if not done:
            break
        rates.append(done / (time.perf_counter() - began))
    return statistics.median(rates)


def own_memory() -> int:
    """Return the bytes of this process that are not pages of files."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def measure_prefetch(tokens: Array) -> Report:
    """Measure steps of 5 ms on packed rows whose reading takes longer than from the page cache."""
    import torch

    from fedplat.pytorch.packed import PackedDataset
    from fedplat.pytorch.training import DatasetExamples

    step_s, steps, size = 0.005, 100, 32
    rows = list[tuple[Cell, ...]]()
    with tempfile.TemporaryDirectory() as temporary:
        with PackedWriter(Path(temporary) / "data", SHARD_BYTES) as writer:
            writer.add(tokens, np.arange(len(tokens)))

        class SlowDataset(PackedDataset):
            """Packed data on a slower disk."""

            delay_s = 0.0

            @override
            def __getitems__(self, indices: Sequence[int]) -> list[TensorPair]:
                time.sleep(self.delay_s)
                return super().__getitems__(indices)

        dataset = SlowDataset(Path(temporary) / "data")
        for delay_s in (0.0, 0.002, 0.004, 0.008):
            dataset.delay_s = delay_s
            cells: list[Cell] = [f"{delay_s * 1000:g}"]
            for ahead in (0, 2):
                order = itertools.islice(shuffled(len(tokens), size, np.random.default_rng(2)), steps)
                began = time.perf_counter()
                for _ in DatasetExamples(dataset, torch.device("cpu"), ahead).batches(order):
                    time.sleep(step_s)
                cells.append((time.perf_counter() - began) / steps * 1000)
            rows.append(tuple(cells))
    columns = ("delay of a read, ms", "step without reading ahead, ms", "step with 2 batches ahead, ms")
    note = (
        f"Batches of {size} rows of tokens. A step sleeps for {step_s * 1000:g} ms in place of an accelerator's work, "
        "and a read sleeps for the delay in place of a slower disk."
    )
    return Report(name="prefetch", title="Reading ahead", columns=columns, rows=tuple(rows), notes=(note,))


if __name__ == "__main__":
    typer.run(main)
