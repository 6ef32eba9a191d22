"""`fedplat model ...` against a scripted server."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from support.cli.commands import Run, parsed
from support.cli.fake_state import State


@pytest.fixture(autouse=True)
def _job(state: State) -> None:
    """A job with two versions."""
    running = state.add_job()
    state.add_version(b"first", 0)
    running.model.CopyFrom(state.add_version(b"second" * 1000, 1).model)


def test_model_list(run: Run, state: State):
    short = run("model", "list", "digits").stdout.splitlines()
    assert short[0].split() == ["VERSION", "ROUND", "UPDATES", "SIZE", "CREATED", "FILES", "METRICS"]
    rows = run("model", "list", "digits", "-o", "wide").stdout.splitlines()[1:]
    digest = state.versions[1].model.digest
    assert [rows[1].split()[i] for i in (0, 1, 2, 3, 4, 5)] == ["1", "1", "8", "1234.5", "5.9", "KiB"]
    assert rows[1].endswith(f"{digest[:12]}  loss 0.25")
    assert parsed(run("model", "list", "digits", "--json"))[1]["model"]["digest"] == digest


def test_model_export(run: Run, state: State, tmp_path: Path):
    path = tmp_path / "m.safetensors"
    result = run("model", "export", "digits", "--to", str(path))
    assert result.stdout == f"wrote version 1 (5.9 KiB) to {path}\n"
    assert path.read_bytes() == b"second" * 1000
    record = parsed(run("model", "export", "digits", "--model-version", "0", "--to", str(path), "--json"))
    assert record == {"version": 0, "digest": state.versions[0].model.digest, "size_bytes": 5, "path": str(path)}
    assert path.read_bytes() == b"first"


def test_an_exported_model_is_for_its_owner_only(run: Run, tmp_path: Path):
    """Even if it replaces a file that others can read, under a permissive umask."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"an older one")
    path.chmod(0o644)
    before = os.umask(0o022)
    try:
        assert run("model", "export", "digits", "--to", str(path)).exit_code == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each for each in tmp_path.iterdir() if each.suffix == ".part"] == []


def test_model_export_that_fails(run: Run, state: State, tmp_path: Path):
    path = tmp_path / "m.safetensors"
    for target in (tmp_path, tmp_path / "nowhere" / "m"):
        result = run("model", "export", "digits", "--to", str(target))
        assert result.exit_code == 2
        assert result.stderr == f"error: --to is {target}; expected a file in an existing folder\n"
    result = run("model", "export", "digits", "--to", str(tmp_path / ("x" * 300)))
    assert result.exit_code == 1
    assert result.stderr.endswith("cannot be written: File name too long\n")
    state.damage = "bytes"
    result = run("model", "export", "digits", "--to", str(path))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: the received model is damaged: ")
    assert list(tmp_path.iterdir()) == []


def test_options_of_model_export_that_do_not_belong_together(run: Run, tmp_path: Path):
    for arguments, words in (
        (
            ["--model", "chat.py:make_model"],
            "--model, --base and --adapter: expected --format peft or merged with them",
        ),
        (["--format", "peft"], "--format peft: expected either --model FILE:FUNCTION"),
        (["--format", "merged", "--model", "chat.py:make", "--adapter", "a.json"], "expected either --model FILE:FUNC"),
        (["--format", "peft", "--adapter", "a.json"], "--adapter FILE: expected --base DIR, the folder of the base"),
        (["--format", "gguf"], "'gguf' is not one of 'safetensors', 'peft', 'merged'"),
    ):
        result = run("model", "export", "digits", "--to", str(tmp_path / "out"), *arguments)
        assert result.exit_code == 2
        assert words in result.stderr
    result = run(
        "model", "export", "m.safetensors", "--model-version", "1", "--to", "out", "--format", "peft", "--model", "a:b"
    )
    assert "--model-version 1: m.safetensors has one model; expected a job for another version" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_export_names_the_packages_that_it_needs(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "fedplat.pytorch.huggingface", None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the command sets it
    options = ["--to", str(tmp_path / "out"), "--format", "merged", "--model", "chat.py:make"]
    result = run("model", "export", "digits", *options)
    assert result.exit_code == 2
    assert "--format merged needs PyTorch, transformers and peft; install them with: pip install " in result.stderr
    assert "peft>=0.21" in result.stderr


def test_model_list_shows_which_files_are_kept(run: Run, state: State):
    state.versions[0].model_removed_unix_s = 5.0
    state.versions[1].has_state = True
    state.versions[1].restored_from = 0
    header, *rows = run("model", "list", "digits").stdout.splitlines()
    assert "FILES" in header
    assert "  removed  " in rows[0]
    assert "  model, state (restored from 0)  " in rows[1]
