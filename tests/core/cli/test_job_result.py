"""`fedplat job result` against a scripted server, and what `fedplat job check` prints of a procedure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat.procedures import Finished
from fedplat.procedures.versions import write_result
from support.cli.commands import Run, parsed
from support.cli.fake_state import State
from support.procedures import procedure_job

RESULT = write_result(5, 2, Finished({"mean": 0.5}, {"table.csv": b"a,b\n", "notes.txt": b""}))


def test_the_result_is_printed_as_it_is_and_its_files_are_written(run: Run, state: State, tmp_path: Path) -> None:
    state.add_job()
    state.add_version(RESULT.to_bytes(), 1)
    printed = run("job", "result", "digits")
    assert printed.stdout == '{"sites":5,"steps":2,"result":{"mean":0.5}}\n'
    assert printed.stderr == "the result has 2 files, which --files DIR writes: table.csv, notes.txt\n"
    written = run("job", "result", "digits", "--files", str(tmp_path / "out"))
    assert written.stderr == f"wrote 2 files to {tmp_path / 'out'}\n"
    assert (tmp_path / "out/table.csv").read_bytes() == b"a,b\n"
    assert (tmp_path / "out/notes.txt").read_bytes() == b""
    (tmp_path / "file").write_text("")
    refused = run("job", "result", "digits", "--files", str(tmp_path / "file"))
    assert (refused.exit_code, refused.stderr.split(" cannot be written")[0]) == (1, f"error: {tmp_path / 'file'}")


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ({"step": np.array([1])}, "the job digits has no result: its latest version is a message or a model"),
        ({"result.json": np.frombuffer(b"[1]", np.uint8)}, "the result is not valid JSON of a procedure"),
        ({"result.json": np.zeros(3)}, "the tensor 'result.json' of a result is float64; expected bytes"),
        (
            {"result.json": np.frombuffer(b"{}", np.uint8), "files/../x": np.zeros(1, np.uint8)},
            "the result has a tensor 'files/../x'; expected its JSON and files",
        ),
    ],
)
def test_what_is_no_result(run: Run, state: State, version: dict[str, np.ndarray], text: str) -> None:
    state.add_job()
    state.add_version(Parameters.from_arrays(version).to_bytes(), 1)
    found = run("job", "result", "digits")
    assert found.exit_code == 1
    assert found.stderr.startswith(f"error: {text}")


def test_a_check_prints_what_leaves_each_client(run: Run, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(procedure_job())
    found = run("job", "check", str(tmp_path / "job.toml")).stdout
    assert "the same 3 sites in each" in found
    assert "what leaves each client:\n  rows: how many rows have a value, for each column; 2 numbers from" in found
    assert found.endswith("  the server sees these numbers of each site, and operators see the result\n")
    (tmp_path / "job.toml").write_text(procedure_job(more="[secure_aggregation]\n"))
    checked = parsed(run("job", "check", str(tmp_path / "job.toml"), "--json"))
    assert checked["disclosures"][-1].startswith("the server sees only sums of these numbers over 3 sites or more")
