"""Replicas that would differ silently are refused with a name, on all ranks."""

from __future__ import annotations

import pytest

from support.model_parallel import piped, unsafe
from support.ranks.group import Zygote

HERE = "support.model_parallel.unsafe"
BUFFER = "the buffer 'layers.{}.dropout.mean' changes in the forward pass"
GRADIENT = "the gradient of 'layers.0.ffn.norm.weight' differs between tensor ranks"


@pytest.mark.parametrize(
    ("layout", "model", "done"), [("shard=2", "mean", 0), ("shard=2", "late mean", 7), ("pipeline=2", "mean", 0)]
)
def test_a_buffer_that_changes_in_the_forward_pass_is_refused_in_turn(layout: str, model: str, done: int) -> None:
    with piped.alone() as ranks:
        assert unsafe.train(ranks, layout, model).startswith(f"after {done} steps: {BUFFER.format(0)}")


def test_a_buffer_that_is_no_part_of_the_model_may_change() -> None:
    with piped.alone() as ranks:
        assert unsafe.train(ranks, "shard=2", "own mean") == ""


@pytest.mark.slow
def test_what_differs_between_replicas_is_refused_on_all_ranks(zygote: Zygote) -> None:
    refused = {
        ("shard=2", "mean", None): BUFFER.format(0),
        ("tensor=2", "mean", None): BUFFER.format(0),
        ("pipeline=2", "mean", None): BUFFER.format(0),  # also the second rank, which has other layers
        ("tensor=2", "gate", "sequence_parallel"): GRADIENT,
    }
    accepted = [
        ("shard=2", "gate", None),
        ("shard=2", "own mean", None),
        ("tensor=2", "gate", "replicated_with_grad_allreduce"),
        ("tensor=2,sequence=true", "gate", "replicated_with_grad_allreduce"),
    ]
    with zygote.group(2) as group:
        found = group.call(f"{HERE}:train_all", cases=[*refused, *accepted])
    assert found[0] == found[1]
    for reason, expected in zip(found[0], refused.values(), strict=False):
        assert reason.startswith(f"after 0 steps: {expected}")
    assert found[0][len(refused) :] == [""] * len(accepted)
    assert "'layers.0.ffn.norm' is between columns and rows" in found[0][3]


@pytest.mark.slow
def test_a_partial_gradient_of_a_sharded_parameter_is_refused(zygote: Zygote) -> None:
    case = ("shard=2,tensor=2", "gate", "sequence_parallel")
    with zygote.group(4) as group:
        found = group.call(f"{HERE}:train_all", cases=[case])
    assert len({each[0] for each in found}) == 1
    assert found[0][0].startswith(f"after 0 steps: {GRADIENT}")
