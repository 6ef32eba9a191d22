"""Jobs whose ranks divide the model: the table `[pool.parallel]`."""

from __future__ import annotations

import pytest

from fedplat.errors import JobFileError
from fedplat.job import is_unreadable, parse_job, read_newer
from fedplat.parallel import Parallel
from support.jobs import SMALL_OF_KEYS

SMALL = f"{SMALL_OF_KEYS}pool.ranks = 4\n"
LAYOUT = f"{SMALL}pool.parallel.shard = 2\npool.parallel.pipeline = 2\n"
TABLE = "trainer = 't'\nbatch_size = 8\nlearning_rate = 0.1\n"
STEP = f"[server_step]\n{TABLE}steps = 2\n"


def test_a_job_without_the_table_has_no_layout() -> None:
    spec = parse_job(SMALL)
    assert spec.pool is not None
    assert (spec.parallel, spec.pool.num_parts, spec.num_ranks) == (None, 4, 4)


def test_a_layout_is_for_training_and_evaluation_on_the_pool() -> None:
    spec = parse_job(
        f"{LAYOUT}evaluation.server = 'e'\n[warm_start]\n{TABLE}max_grad_norm = 1.0\nprofile = true\n{STEP}"
    )
    assert spec.pool is not None
    assert spec.parallel == Parallel(shard=2, pipeline=2)
    assert (spec.pool.num_parts, spec.num_ranks) == (2, 4)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{SMALL}pool.parallel.shard = 2\n", r"pool.ranks = 4, but .* 2 shard .* = 2; expected ranks = 2"),
        (f"{LAYOUT}pool.parallel.micro_batches = 1\n", "needs at least one for each of 2 stages"),
        (f"{LAYOUT}[warm_start]\n{TABLE}precision = 'fp16'\n", "warm_start.precision = 'fp16': expected .*fp32.*bf16"),
        (f"{LAYOUT}{STEP}precision = 'fp16'\n", "server_step.precision = 'fp16': expected .*fp32.*bf16"),
        (f"{LAYOUT}pool.parallel.sequence = true\n", "expected tensor = 2 or more"),
        (f"{LAYOUT}pool.parallel.shards = 2\n", "there is no such key; did you mean shard"),
        (f"{LAYOUT}{STEP}method = 'distill'\n", 'whole models; expected "train", or no table'),
    ],
)
def test_what_cannot_work_is_refused(text: str, reason: str) -> None:
    with pytest.raises(JobFileError, match=reason):
        parse_job(text)


def test_a_layout_of_a_later_release_is_not_ignored() -> None:
    text = f"{LAYOUT}pool.parallel.context = 2\n"
    with pytest.raises(JobFileError, match=r"pool.parallel.context = 2: there is no such key"):
        parse_job(text)
    assert is_unreadable(read_newer(text, None))
