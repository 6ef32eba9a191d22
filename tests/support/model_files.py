"""What ranks do with the file of a model: on one host, or on what looks like several."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path
from typing import Any

import numpy as np

from fedplat.errors import TrainingError
from fedplat.model import Parameters
from fedplat.pytorch.distributed import STEP_BYTES, Ranks
from fedplat_client.trainers import model_file

SIZE = 3_000_000
"""Entries: several chunks."""


def make_model() -> Parameters:
    values = np.arange(SIZE, dtype=np.float32)
    return Parameters.from_arrays({"weight": values, "count": np.array([3]), "half": values[:7].astype(np.float16)})


def fill_disk(ranks: Ranks, folder: str, full: int) -> list[str]:
    """Share a model twice with a host for each rank; the first time, that of the rank `full` has no space.

    Returns the error and what is left in the folder, then the number of meetings of all ranks.
    """
    os.environ["TMPDIR"] = folder
    model_file.tempfile.tempdir = None
    own, limits, gather = model_file.describe_host(), resource.getrlimit(resource.RLIMIT_FSIZE), Ranks.all_gather
    num_meetings = [0]

    def count(self: Ranks, content: bytes) -> list[bytes]:
        num_meetings[0] += 1
        return gather(self, content)

    model_file.describe_host = lambda: own + bytes([min(ranks.rank, 1)])
    model_file._STEP_CHUNKS = 1  # type: ignore[misc]
    model = make_model() if ranks.is_first else None
    if ranks.rank == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with model_file.share_model(ranks, model):
            error = ""
    except TrainingError as exc:
        error = str(exc)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    ranks.barrier()
    left = os.listdir(folder)
    ranks.barrier()
    Ranks.all_gather = count
    try:
        with model_file.share_model(ranks, model) as parameters:
            same = parameters == make_model()
    finally:
        Ranks.all_gather = gather
        model_file.describe_host = lambda: own
        model_file._STEP_CHUNKS = STEP_BYTES // model_file._CHUNK_BYTES  # type: ignore[misc]
    return [error, str(left), str(num_meetings[0]), str(same)]


def share(ranks: Ranks, folder: str, hosts: list[int]) -> dict[str, Any]:
    """Share a model; `hosts` are the numbers of the ranks' hosts. Rank 0 changes its mapping."""
    own_folder = Path(folder, f"host{hosts[ranks.rank]}")  # each host has its own
    own_folder.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(own_folder)
    model_file.tempfile.tempdir = None
    own = model_file.describe_host()
    real, modes = model_file.shutil.rmtree, list[str]()

    def remember(path: Path, **options: Any) -> None:
        modes.extend(oct(stat.S_IMODE(os.stat(each).st_mode)) for each in (path, path / "model.safetensors"))
        real(path, **options)

    model_file.describe_host = lambda: own + bytes([hosts[ranks.rank]])
    model_file.shutil.rmtree = remember  # type: ignore[assignment]
    try:
        model = make_model() if ranks.is_first else None
        with model_file.share_model(ranks, model) as parameters:
            same = parameters == make_model()
            ranks.barrier()  # all files are removed
            left = os.listdir(own_folder)
            if ranks.is_first:
                parameters["weight"] *= 2
            ranks.barrier()
        seen = float(parameters["weight"][5])
        ranks.barrier()  # rank 0 computes its update in place
        update = None
        if model is not None:
            expected = parameters.minus(model)
            update = model_file.subtract(parameters, model) == expected
        return {"same": same, "left": left, "seen": seen, "modes": modes, "update": update}
    finally:
        model_file.describe_host = lambda: own
        model_file.shutil.rmtree = real
