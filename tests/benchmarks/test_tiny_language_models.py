"""The experiment with adapters of a tiny language model, on made-up plays instead of Shakespeare's."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import federated_adapters
import numpy as np
import pytest
import reproduction

from fedplat.config import user_code
from fedplat.errors import DataError
from fedplat.simulation import Federation, simulate

MODULE = "tiny_language_models.py"
WORDS = "the of and to in is that it was for on as with his he be at by this had not are but from or have an they which"


@pytest.fixture
def plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with plays of 20 speakers, whose lines are frequent words in a random order."""
    rng, words = np.random.default_rng(0), np.array(WORDS.split())
    weights = 1 / np.arange(1, len(words) + 1)
    speeches: list[str] = []
    for speaker in range(20):
        for _ in range(9 if speaker < 8 else 6):
            lines = [" ".join(rng.choice(words, 10, p=weights / weights.sum())) for _ in range(13 + speaker % 8)]
            speeches.append("\n".join([f"SPEAKER {speaker}:", *lines]))
    (tmp_path / "tinyshakespeare.txt").write_text("\n\n".join(speeches) + "\n")
    monkeypatch.setenv("FEDPLAT_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_clients_are_the_largest_speakers_and_hold_out_the_rows_that_follow(plays: Path) -> None:
    federation = user_code.call(f"{MODULE}:federate", reproduction.HERE)
    pooled = user_code.call(f"{MODULE}:federate", reproduction.HERE, {"pooled": True})
    assert isinstance(federation, Federation)
    assert isinstance(pooled, Federation)
    assert {len(part) for part in federation.parts} == {48}
    assert len({len(part) for part in federation.held_out}) == 8
    assert all(out[0] == part[-1] + 1 for part, out in zip(federation.parts, federation.held_out, strict=True))
    assert federation.targets[0, :-1].tolist() == federation.inputs[0, 1:].tolist()
    assert b"gur" in federation.inputs.astype(np.uint8).tobytes(), "the lines are in rot13"
    assert len(federation.test_inputs) == sum(map(len, federation.held_out))
    assert pooled.parts[0].tolist() == np.concatenate(federation.parts).tolist()


@pytest.mark.slow
def test_federated_adapters_halve_the_perplexity_of_the_base(plays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    load_base = user_code.load_function(f"{MODULE}:load_base", reproduction.HERE)
    monkeypatch.setattr(sys.modules[load_base.__module__], "BASE_STEPS", 100)
    found: dict[str, float] = {}
    for cell in federated_adapters.PAPER.cells:
        if cell.name not in ("base", "fedavg"):
            continue
        run = simulate(cell.file("rounds=1" if cell.name == "base" else "rounds=3"))
        assert run.model is not None
        # Queries and values of two layers: both factors, of 64 and 4, or 4 and 64 or 32.
        assert len(run.model.buffer) == 4 * 2 * 4 * (64 + 64 + 64 + 32)
        [by_clients] = [each.metrics["loss"] for each in run.result.attempts if each.kind == "EVALUATE"]
        pooled = run.result.rounds[-1].evaluation["loss"]
        # The sum over all tokens divided by their number, though speakers hold out different numbers of rows.
        assert by_clients == pytest.approx(pooled, rel=1e-6)
        found[cell.name] = math.exp(pooled)
    assert 1.0 < found["fedavg"] < found["base"] / 2


def test_without_the_plays_the_error_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPLAT_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"tinyshakespeare.txt is not in .*; set FEDPLAT_DATA"):
        user_code.call(f"{MODULE}:read_plays", reproduction.HERE)
