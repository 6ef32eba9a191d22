"""Tensors that take turns: what is sent in a round, how the server reads it, and that what rests keeps its value."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedplat import report_validation
from fedplat.aggregate import Accumulator, Contribution
from fedplat.errors import ModelError
from fedplat.job import build_rule, calibrate, parse_job
from fedplat.model import BLOCK, ModelFile, Parameters, Values
from fedplat.model.file import FilePart
from fedplat.model.turns import Turn, spread, spread_vector
from fedplat.privacy import Noise
from fedplat.rounds.states import Reason
from support.jobs import SMALL

NAMES = "*lora_B*, *lora_A*"


def model(value: float = 0.0, count: int = 3) -> Parameters:
    tensors: dict[str, Any] = {
        "head": np.full(2, value, np.float32),
        "q.lora_A": np.full(count, value, np.float32),
        "q.lora_B": np.full((2, 2), value, np.float32),
        "v.lora_A": np.full(count, value, np.float64),
        "steps": np.full(2, 7, np.int64),
    }
    return Parameters.from_arrays(tensors)


@pytest.mark.parametrize(
    ("alternate", "resting"),
    [
        ("", [[], []]),
        (NAMES, [["q.lora_A", "v.lora_A"], ["q.lora_B"]]),
        ("*lora_A,*lora_B*,head", [["head", "q.lora_B"], ["head", "q.lora_A", "v.lora_A"], ["q.lora_A", "q.lora_B"]]),
        ("*lora_B*", [[], []]),
        ("*lora_B*, *lora_C*", [[], []]),  # the trainer refuses such a job
        ("q.*, *.lora_A", [["v.lora_A"], ["q.lora_B"]]),
        ("steps, q.*", [[], []]),  # integers are sent in each round
    ],
)
def test_one_group_is_sent_in_each_round(alternate: str, resting: list[list[str]]) -> None:
    schema = model().schema
    for number, expected in enumerate(resting, 1):
        sent = {tensor.name for tensor in Turn.of(alternate, number).select_uploaded(schema).tensors}
        assert {*model()} - sent >= {*expected}
        if len(resting) == 2:
            assert {*model()} - sent == {*expected}
            assert Turn.of(alternate, number + 2).select_uploaded(schema) == Turn.of(alternate, number).select_uploaded(
                schema
            )


def test_a_client_leaves_out_what_rests_unless_it_has_changed() -> None:
    turn, update = Turn.of(NAMES, 1), model()
    update["q.lora_B"][:] = 3.0
    sent = turn.leave_out(update)
    assert sorted(sent) == ["head", "q.lora_B", "steps"]
    assert (sent["q.lora_B"] == 3.0).all()
    assert Turn().leave_out(update) is update
    update["v.lora_A"][1] = 1e-3
    with pytest.raises(ModelError, match=r"'v.lora_A' rests in round 1 .*; expected a trainer that keeps its value"):
        turn.leave_out(update)


@pytest.mark.parametrize("count", [0, 3, BLOCK - 1, 2 * BLOCK + 5])
@pytest.mark.parametrize("number", [1, 2])
def test_an_update_has_zeros_for_what_rests(tmp_path: Path, count: int, number: int) -> None:
    turn, whole = Turn.of(NAMES, number), model(2.5, count)
    for name in turn.list_resting(whole):
        whole[name][:] = 0
    sent = turn.leave_out(whole)
    (tmp_path / "update").write_bytes(sent.to_bytes())
    values: list[Values] = [sent, ModelFile.open(tmp_path / "update")]
    for each in values:
        read = spread(each, whole.schema)
        assert read.schema == whole.schema
        for _ in range(2):
            blocks = [block.copy() for block in read.to_blocks()]
            assert all(block.size == BLOCK for block in blocks[:-1])
            np.testing.assert_array_equal(np.concatenate(blocks), whole.to_vector())
        columns = range(BLOCK, whole.schema.num_floating)
        if columns:
            part = np.concatenate([block.copy() for block in read.to_blocks(columns)])
            np.testing.assert_array_equal(part, whole.to_vector()[BLOCK:])
        [run] = [each for each in whole.schema.segments if each.dtype == "I64"]
        np.testing.assert_array_equal(np.concatenate([*read.read_carried(run)]), [7, 7])
    np.testing.assert_array_equal(spread_vector(sent.to_vector(), sent.schema, whole.schema), whole.to_vector())
    assert spread(whole, whole.schema) is whole


def test_an_update_with_other_tensors_is_refused_by_name(tmp_path: Path) -> None:
    base, turn = tmp_path / "base", Turn.of(NAMES, 1)
    base.write_bytes(model(1.0).to_bytes())

    def judge(update: Parameters) -> float | report_validation.Verdict:
        (path := tmp_path / "update").write_bytes(update.to_bytes())
        running = report_validation.running_norm(base, None, turn)
        assert running is not None
        running.update(update.to_bytes())
        found = report_validation.validate_file(FilePart(path), base, None, running, turn=turn)
        assert found == report_validation.validate_file(FilePart(path), base, None, turn=turn)
        return found

    update = model()
    update["q.lora_B"][:] = 3.0
    assert judge(turn.leave_out(update)) == judge(update) == 6.0  # a client before 0.2 sends the others, too
    update = model()
    for wrong, name in ((Turn.of(NAMES, 2).leave_out(update), "q.lora_B"), (Parameters.from_arrays({}), "steps")):
        verdict = judge(wrong)
        assert isinstance(verdict, report_validation.Verdict)
        assert verdict.reason is Reason.REJECTED_SCHEMA
        assert f"tensor '{name}' is missing" in verdict.text
    without = Parameters.from_arrays({name: update[name] for name in update if name != "v.lora_A"})
    verdict = judge(without)
    assert isinstance(verdict, report_validation.Verdict)
    assert "tensor 'q.lora_A' is not part of the model (1 in all)" in verdict.text


TURNS = f'[config]\nalternate = "{NAMES}"\n'
JOB = SMALL + TURNS
MOMENTUM = '[aggregation]\nrule = "fedavgm"\nmomentum = 0.5\n'
PRIVATE = (
    f'{SMALL}close = "deadline"\n{TURNS}'
    '[updates]\nweighting = "uniform"\nclip_norm = 1.0\noutlier_factor = 0.0\nmax_weight_factor = 0.0\n'
    '[privacy]\ntrust = "server"\nparticipation = "fixed"\nnoise_multiplier = 0.5\nmax_releases = 9\ndelta = 1e-3\n'
)


def run(text: str, num_rounds: int) -> list[Parameters]:
    """Return all versions of a job in which each client adds 1 to what is trained in a round."""
    spec, versions, scalars, state = calibrate(parse_job(text)), [model(1.0)], {}, None
    for number in range(1, num_rounds + 1):
        base, turn = versions[-1], spec.turn(number)
        rule = build_rule(spec, noise=Noise(bytes([number] * 32)), round=number)
        state = rule.init(base.schema.num_floating) if state is None else state
        update = model(1.0)
        for name in turn.list_resting(update):
            update[name][:] = 0
        accumulator = Accumulator(base.schema, rule, scalars)
        for _ in range(4):
            accumulator.fold(spread(turn.leave_out(update), base.schema), Contribution(1.0))
        following, state = accumulator.finish(base, state)
        versions.append(following)
        scalars = accumulator.scalars
    return versions


def test_neither_a_momentum_nor_noise_moves_what_rests() -> None:
    """The momentum of a group continues in its next turn: v ← v / 2 + 1 in each of them (Reddi et al. 2021)."""
    for text in (JOB, JOB + MOMENTUM, PRIVATE):
        versions = run(text, 4)
        for number, (before, after) in enumerate(itertools.pairwise(versions), 1):
            for name in ("q.lora_A", "q.lora_B", "v.lora_A"):
                rests = ("lora_A" in name) == (number % 2 == 1)
                assert np.array_equal(before[name], after[name]) == rests
    moved = run(JOB + MOMENTUM, 4)[-1]
    for name, expected in (("q.lora_B", 1 + 1 + 1.5), ("q.lora_A", 1 + 1 + 1.5), ("head", 1 + 1 + 1.5 + 1.75 + 1.875)):
        np.testing.assert_allclose(moved[name], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        JOB + '[compression.uplink]\ncodec = "bf16"\n',
        JOB + '[mode]\nkind = "buffered"\nconcurrency = 8\n',
        PRIVATE.replace('"fixed"', '"min_separation"').replace("goal = 4", "goal = 4\nmin_separation = 2"),
    ],
)
def test_other_jobs_send_all_tensors(text: str) -> None:
    assert parse_job(text).turn(1) == Turn()
    assert parse_job(JOB).turn(2) == Turn(("*lora_B*", "*lora_A*"), 2)
    assert parse_job(SMALL + "[config]\nalternate = 3\n").turn(1) == Turn()
