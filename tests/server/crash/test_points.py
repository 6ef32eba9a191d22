"""The list of crash points, and a chain that is short enough for every run."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.crash import chains, points, scenario
from support.crash.chains import Chain
from support.crash.nursery import Nursery, Order

SHORT = ["create_job.after", "upload.append.after", "save.uncharged", "spool.keep.before"]


@pytest.mark.fault("F1", "F2", "F4")
async def test_killed_at_one_point_after_the_other(zygote: Nursery, folder: Path) -> None:
    world = Chain(zygote, Order(folder, f"sqlite:///{folder / 'fedplat.sqlite'}", folder.parent / "server.log"))
    await chains.train(world, SHORT, lambda rounds: scenario.job_text(rounds=rounds))


def test_points_are_found() -> None:
    assert {*SHORT} <= {*chains.POINTS}
    assert len(chains.POINTS) >= 70


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("crash_points.point(name)", "one literal text"),
        ("crash_points.point('a' + 'b')", "one literal text"),
        ("crash_points.step()", "one literal text"),
        (
            "with crash_points.step('a'):\n  crash_points.point('a.before')",
            "the crash point a.before is at module.py:1 already",
        ),
    ],
)
def test_points_that_could_be_missed_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "module.py").write_text(text)
    with pytest.raises(ValueError, match=said):
        points.all_points(tmp_path)
