"""What an operator sees of `fedplat-server verify`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.commands import here
from support.verify.places import Place


def test_the_command(place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("verify", "--data-dir", str(place.folder), "--database", place.database)
    status, out, err = here(monkeypatch, capsys, *arguments)
    assert (status, err) == (0, "")
    assert out.startswith("checked 4 jobs, 5 attempts, 13 assignments, 7 versions, ")
    assert out.endswith("MiB): nothing is broken\n")
    assert json.loads(here(monkeypatch, capsys, *arguments, "--json")[1])["clean"] is True

    place.blob("digest", "done", 0).unlink()  # a file only: small models of rounds are rows, too
    status, out, err = here(monkeypatch, capsys, *arguments)
    assert (status, err) == (1, "")
    lines = out.splitlines()
    found = json.loads(here(monkeypatch, capsys, *arguments, "--json")[1])["findings"][0]["place"]
    assert found["job"] in place.jobs.values(), "one of those that began with this model"
    assert lines[0].startswith(f"broken I2: job {found['job']} version 0: its model is not there; expected the")
    assert ". If the models are in another place, name it with --blobs. Otherwise copy" in lines[0]
    assert lines[1].endswith("MiB): 1 findings")
    status, out, err = here(monkeypatch, capsys, *arguments, "--json")
    assert (status, err) == (1, "")
    (finding,) = json.loads(out)["findings"]
    assert finding["place"] == {
        "job": found["job"],
        "version": 0,
        "round": None,
        "attempt": None,
        "client": None,
    }
    assert finding["advice"]


def test_the_command_where_there_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = here(monkeypatch, capsys, "verify", "--data-dir", str(tmp_path / "nowhere"))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "there is no data folder" in err
    assert not (tmp_path / "nowhere").exists()
    status, out, err = here(monkeypatch, capsys, "verify", "--data-dir", str(tmp_path))
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "run fedplat-server db upgrade" in err
    assert here(monkeypatch, capsys, "verify", "--no-such-option")[0] == 2
