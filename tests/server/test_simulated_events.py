"""The daemon's runner and store decide what the simulator decided, when the same happens at the same moments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from fedplat.job import parse_job
from fedplat.rounds import Change, Context, Coordinator, JobState, ModelVersion
from fedplat.rounds.commands import Command
from fedplat.simulation.driver import Tokens, coordinator_rng
from fedplat.simulation.run import Simulation
from fedplat_server.coordination.runner import Runner, Timer
from fedplat_server.database.store import open_store
from support import databases
from support.jobs import write_job
from support.simulation.cases import BAD, make_fleet
from support.simulation.recordings import record

SEED = 9
JOB_FILE = write_job(
    "job",
    trainer="digits",
    rounds=4,
    model={"initial": "model:make"},
    selection={"goal": 8, "over_selection": 1.3, "min_fraction": 0.5},
    deadlines={"selection_s": 60.0, "training_s": 60.0, "upload_s": 30.0},
)


class Notes:
    """An actor that does nothing but remember."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.changes: list[Change] = []

    def act(self, command: Command) -> None:
        self.commands.append(command)

    def on_stored(self, changes: Sequence[Change]) -> None:
        self.changes += changes


class SimulatedClock:
    """Stands at the moment of a batch. Its timers never fire: those of the simulation are among its events."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(3600.0, callback)


async def test_the_daemon_stores_what_the_simulator_decided(tmp_path: Path) -> None:
    spec = parse_job(JOB_FILE)
    batches = record(Simulation(spec=spec, fleet=make_fleet(40, **BAD), seed=SEED, model_bytes=4.0))
    state = JobState(spec.name, spec, ModelVersion(version=0, round=0, attempt=0, digest="version-0", size_bytes=4))
    store, notes, clock = (
        await open_store(databases.create_sqlite(tmp_path / "fedplat.sqlite")),
        Notes(),
        SimulatedClock(),
    )
    await store.jobs.create_job(state, JOB_FILE, "key")
    rng, new_token = coordinator_rng(SEED), Tokens()
    runner = Runner(Coordinator([state]), store, clock, lambda now: Context(now, rng, new_token))
    running = asyncio.create_task(runner.run(notes))
    try:
        for events, moment, proposal in batches:
            clock.now = moment
            notes.commands, notes.changes = [], []
            verdicts = await asyncio.gather(*(runner.submit(event) for event in events))
            while runner.has_events:
                await asyncio.sleep(0)
            assert verdicts == proposal.verdicts
            assert notes.changes == proposal.changes
            assert notes.commands == proposal.commands
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    (found,) = await store.jobs.load_jobs()
    assert found.state.status == "COMPLETED"
    await store.close()
