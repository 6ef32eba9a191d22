"""Jobs whose server trains asynchronously: Hogwild and PipeDream."""

from __future__ import annotations

import pytest

from fedplat.errors import JobFileError
from fedplat.job import parse_job
from support.jobs import SMALL_OF_KEYS

SMALL = f"{SMALL_OF_KEYS}warm_start.trainer = 'digits'\nwarm_start.batch_size = 8\nwarm_start.learning_rate = 0.1\n"
HOGWILD = f"{SMALL}warm_start.method = 'hogwild'\npool.ranks = 2\n"
PIPEDREAM = f"{SMALL}pool.ranks = 2\npool.parallel.pipeline = 2\npool.parallel.schedule = 'pipedream'\n"


def test_a_warm_start_is_synchronous_by_default() -> None:
    warm_starts = [parse_job(text).warm_start for text in (SMALL, HOGWILD)]
    assert [each.method for each in warm_starts if each is not None] == ["sgd", "hogwild"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("warm_start.momentum = 0.9", "each rank would have a velocity of its own"),
        ("warm_start.scaling = 'linear'", "each batch of one rank is an update of its own"),
        ("pool.parallel.shard = 2", "each rank trains the whole model"),
        ("pool.backend = 'nccl'", "the ranks share the memory of the host"),
    ],
)
def test_hogwild_refuses_what_needs_a_common_step(line: str, text: str) -> None:
    with pytest.raises(JobFileError, match=text):
        parse_job(HOGWILD + line)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("warm_start.max_grad_norm = 1.0", "warm_start.max_grad_norm: .* there is no total norm"),
        ("warm_start.accumulate = 2", "warm_start.accumulate = 2: .* every batch is a step"),
        ("warm_start.precision = 'bf16'", 'warm_start.precision = "bf16": .* keeps versions'),
        ("pool.parallel.micro_batches = 4", "each batch is a step; remove micro_batches"),
    ],
)
def test_pipedream_refuses_what_needs_a_common_step(line: str, text: str) -> None:
    assert parse_job(PIPEDREAM).parallel is not None
    with pytest.raises(JobFileError, match=text):
        parse_job(PIPEDREAM + line)
