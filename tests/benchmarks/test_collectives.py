"""The comparison of collectives: every implementation is right, and the command runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from collectives import compare
from collectives.implementations import POINT_TO_POINT, SHARED, SHARED_MEMORY
from fedplat.pytorch.distributed.bench.records import LIBRARY, BenchReport
from fedplat_server.errors import ConfigError
from support.cli.runner import CliRunner
from support.ranks.group import Zygote


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    process = Zygote()
    yield process
    process.close()


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4])
def test_every_implementation_is_right_on_any_number_of_ranks(zygote: Zygote, count: int) -> None:
    # The second size has more than one chunk of a ring, and pieces of an odd size.
    sizes = [4 * count, 4 * (2**20 + 3)] if count == 3 else [4 * count, 4000]
    with zygote.group(count) as group:
        replies = group.call(
            "support.ranks.on_ranks:bench", sizes=sizes, trials="collectives.implementations:make_trials"
        )
    report = msgspec.convert(replies[0]["report"], BenchReport)
    assert [each for each in report.measurements if not each.is_correct] == []
    found = {(each.collective, each.implementation) for each in report.measurements}
    expected = {(name, implementation) for name, table in POINT_TO_POINT.items() for implementation in table}
    expected |= {(name, LIBRARY) for name in POINT_TO_POINT} | {(name, SHARED) for name in SHARED_MEMORY}
    assert found == expected
    assert len(report.measurements) == 2 * len(found)
    assert {each.size for each in report.measurements} == {size // 4 // count * count * 4 for size in sizes}


@pytest.mark.slow
def test_one_command_compares_them() -> None:
    program = Path(compare.__file__)
    arguments = ["--min-size", "4KB", "--max-size", "64KB", "--collective", "all-reduce", "--json"]
    done = subprocess.run([sys.executable, str(program), *arguments], capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["is_healthy"] else 1)  # which a busy machine may not be
    found = {(each["collective"], each["implementation"], each["size"]) for each in report["measurements"]}
    names = (LIBRARY, "star", "tree", "ring", SHARED)
    assert found == {("all-reduce", name, size) for name in names for size in (4096, 65536)}
    assert all(each["is_correct"] for each in report["measurements"])


def test_a_mistake_is_one_clear_line() -> None:
    result = CliRunner().invoke(compare.app, ["--step", "1"])
    assert isinstance(result.exception, ConfigError)  # which ends the program with one line
    assert str(result.exception) == "--step 1: expected 2 or more"
