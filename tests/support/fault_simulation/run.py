"""One simulation from its seed to its verdict, in a process of its own."""

from __future__ import annotations

import asyncio
import gc
import resource
import traceback
from pathlib import Path
from typing import Any

from fedplat_server.storage import segments
from fedplat_server.verify.inspection import verify
from support import databases
from support.crash import recompute
from support.fault_simulation import ambient
from support.fault_simulation import plan as plans
from support.fault_simulation.world import World, simulated


def run(seed: int, folder: Path) -> dict[str, Any]:
    """Runs a seed in an empty folder, and returns what was found. The process can not be used afterwards."""
    gc.disable()
    plan = plans.draw(seed)
    ambient.take(lambda: 0.0, seed)
    data_dir = folder / "data"
    data_dir.mkdir()
    databases.create_sqlite(data_dir / "fedplat.sqlite")
    if not plan.has_records:
        segments.MAX_BYTES = 0
    world = World(plan, data_dir)
    try:
        with simulated(world):
            task = world.loop.create_task(world.live())
            world.loop.run_until(lambda: task.done() or bool(world.findings))
            if task.done():
                task.result()
        if not world.findings:
            asyncio.run(_check(world))
    except Exception:
        world.find(traceback.format_exc())
    return _report(world)


async def _check(world: World) -> None:
    """What must hold of the database and the files at the end."""
    database = f"sqlite:///{world.folder / 'fedplat.sqlite'}"
    report = await verify(database, world.folder)
    for text in (*report.findings, *report.notes):
        world.find(f"verify: {text}")
    result = await recompute.read(database)
    try:
        recompute.check_versions(world, result, world.folder)  # pyright: ignore[reportArgumentType]
        recompute.check_receipts(world, result, kept=world.plan.keeps_updates)  # pyright: ignore[reportArgumentType]
    except (AssertionError, KeyError) as exc:
        world.find(f"recomputed: {exc!r}")
    places = (world.folder / "uploads", world.folder / "segments")
    if left := [path for place in places for path in place.rglob("*") if path.is_file()]:
        world.find(f"updates are left that are not needed: {left}")


def _report(world: World) -> dict[str, Any]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    happened = {**world.happened, **world.network.happened, **world.disk.happened}
    return {
        "seed": world.plan.seed,
        "findings": world.findings,
        "plan": world.plan.describe(),
        "last": list(world.last),
        "trace": f"{world.trace_hash & (2**64 - 1):016x}",
        "simulated_s": round(world.loop.time(), 3),
        "cpu_s": round(used.ru_utime + used.ru_stime, 3),
        "steps": world.loop.num_steps,
        "calls": world.network.num_calls,
        "receipts": len(world.receipts),
        "happened": happened,
        "reached": world.reached,
    }
