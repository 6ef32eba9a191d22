"""Jobs that limit how often, and how soon again, a client takes part."""

from __future__ import annotations

from support.jobs import write_job
from support.store.driver import Driver


def write(kind: str, most: int, rest: int) -> str:
    return write_job(
        "digits",
        trainer="digits",
        rounds=20,
        model={"initial": "model.safetensors"},
        updates={"weighting": "uniform", "clip_norm": 1.0},
        privacy={"participation": kind, "delta": 1e-6, "noise_multiplier": 1.0, "max_participations": most},
        selection={"goal": 2, "close": "deadline", "min_separation": rest},
    )


LIMITED = write(kind="fixed", most=2, rest=0)
SEPARATED = write(kind="min_separation", most=0, rest=2)
BOTH = write(kind="min_separation", most=2, rest=1)


async def play(driver: Driver, job_id: str, *names: str) -> None:
    """A round with these clients."""
    await driver.check_in(*names)
    assert set(driver.cohort(job_id)[1]) == set(names)
    await driver.report(job_id, names)
