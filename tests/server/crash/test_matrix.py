"""The server dies at every crash point, in chains; nothing is lost, and the models are the same bit for bit.

The points come from the source text, so a new one is tested automatically: in the rounds of a training, if no other
chain has it. A life that does not end where it should is a failure.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fedplat import codecs
from fedplat.rounds.protocols.ssp import clocks_from_builtins
from fedplat_server.verify.inspection import verify
from support.crash import chains, evaluator, recompute, scenario
from support.crash.chains import POINTS, Chain
from support.crash.nursery import Nursery, Order
from support.crash.scenario import KILLED, World
from support.daemons import initial_model

# Also a busy machine ends a chain before that. test_points.py has a short one.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DOWNLINK = '[compression]\ndownlink = {codec = "eden"}\n'
SCORED = '[evaluation]\nserver = "score"\n'
EVALUATOR = f"{evaluator.__file__}:score"


@pytest.fixture(params=["sqlite", "postgres"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database of each kind."""
    if request.param == "postgres":
        return request.getfixturevalue("empty_postgres")
    return f"sqlite:///{tmp_path / 'empty.sqlite'}"


@pytest.fixture
async def world(zygote: Nursery, folder: Path, database: str) -> Chain:
    return Chain(zygote, Order(folder, database, folder.parent / "server.log", {"score": EVALUATOR}))


def in_sqlite(zygote: Nursery, folder: Path) -> Chain:
    """A world on SQLite, for tests that do not depend on the database."""
    database = f"sqlite:///{folder / 'fedplat.sqlite'}"
    return Chain(zygote, Order(folder, database, folder.parent / "server.log"))


async def check(world: World, *, kept: bool = True) -> None:
    """Everything that must hold after a training with any number of crashes; `kept`: all receipts were merged."""
    order = world.order
    report = await verify(order.database, order.data_dir)
    assert (report.findings, report.notes) == ([], [])
    result = await recompute.read(order.database)
    recompute.check_versions(world, result, order.data_dir)
    recompute.check_receipts(world, result, kept=kept)
    places = (order.data_dir / "uploads", order.data_dir / "segments")
    left = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert left == [], "updates are left that are not needed"


# --- every point ---------------------------------------------------------------------------------------------

ENROLLING, UPLOADING = chains.of("enroll"), chains.of("model", "blob.write", "blob.fsync", "blob.new_folder")
ROWS = ["rows.uncommitted", *chains.of("blob.copy")]
"""The points that only small updates and models reach."""
FILES = chains.of("spool.new_folder", "spool.sync", "spool.folder_sync", "spool.discard")
"""The points that only updates with a file of their own reach."""
MOVING = chains.of("blob.rename", "blob.folder_sync")
CREATING, CHECKING_IN = chains.of("create_job"), chains.of("update_client", "begin_sessions")
DELTAS, SCORES = chains.of("commit.delta"), chains.of("metrics")
ORPHANS = ["blob.rename.after", *chains.of("blob.remove_orphan")]
"""A model without a row, which the next start and the one after it remove."""
UPGRADES = ["schema.upgrade.before", "schema.upgrade.uncommitted", "schema.upgrade.after"]
ELSEWHERE = {
    *(*ENROLLING, *chains.of("model"), *CREATING, *chains.of("update_client"), *DELTAS, *SCORES, *ORPHANS, *UPGRADES),
    *chains.of("retention", "delete"),  # in test_retention.py: versions that are not kept cannot be recomputed
    *chains.of("delivery"),  # in test_deliveries.py: without a webhook they are not reached
    *chains.of("object"),  # in test_object_store.py: models in a folder do not reach them
    *chains.of("spool_store"),  # in test_object_spool.py: a spool in a folder does not reach them
}
IN_ROUNDS = [point for point in POINTS if point not in ELSEWHERE and point not in ROWS and point not in FILES]
SECOND = ["blob.write.after:2", "blob.rename.before:2", "blob.rename.after:2"]
"""The first file of a version is its model, the second one the state of its rule."""
HALVES = [slice(0, None, 2), slice(1, None, 2)]


@pytest.mark.parametrize("seed", [1])
async def test_killed_at_every_point_before_the_first_round(world: Chain, seed: int) -> None:
    """Each point of a step is passed until the step succeeds: an enrolment, the upload of a model, a job's creation."""
    points = [
        *ENROLLING,
        *chains.draw(seed, *UPLOADING, *MOVING),
        *CREATING,
        *chains.draw(seed, *CHECKING_IN, *chains.of("save")[:2]),
    ]
    await chains.train(world, points, lambda rounds: scenario.job_text(rounds=rounds))
    await check(world)


@pytest.mark.fault("F1", "F2", "F3", "F4", "F5")
@pytest.mark.parametrize("seed", [2])
@pytest.mark.parametrize("half", HALVES, ids=["first", "second"])
async def test_killed_at_every_point_of_the_rounds(world: Chain, seed: int, half: slice) -> None:
    """The round continues: no attempt is lost. What is aggregated again has the same bits (I10).

    One stored model belongs to no job.
    """

    async def leave_something(world: World) -> None:
        await world.ask(lambda site: site.operator.upload(initial_model()))

    world.side = scenario.LARGE
    links = chains.draw(seed, *IN_ROUNDS, *SECOND)[half]
    points = ["create_job.after", *chains.draw(seed, *links, ORPHANS)]
    await chains.train(world, points, lambda rounds: scenario.job_text(rounds=rounds), disturb=leave_something)
    await check(world)
    _, attempts = await recompute.read(world.order.database)
    assert sorted(attempts) == [(number, 1) for number in range(1, len(points) + 2)]
    assert {"SELECTING", "COLLECTING", "COMMITTING", "COMMITTED"} <= world.phases


@pytest.mark.fault("F2", "F3", "F4")
@pytest.mark.parametrize("seed", [9])
async def test_killed_while_small_updates_and_models_become_rows(world: Chain, seed: int) -> None:
    """Two of three updates come inside their reports: with their models they are in the transactions, or nowhere."""
    states = ["blob.copy.before:2", "blob.copy.after:2", "rows.uncommitted:2"]
    others = ["blob.write.after", "commit.model.after", "commit.state.after", "save.after:3", "save.uncommitted:3"]
    points = ["create_job.after", *chains.draw(seed, *ROWS, *states, *others, "spool.keep.before")]
    await chains.train(world, points, lambda rounds: scenario.job_text(rounds=rounds))
    await check(world)


@pytest.mark.fault("F2", "F4")
@pytest.mark.parametrize("seed", [10])
async def test_killed_while_updates_become_files(world: Chain, seed: int) -> None:
    """Those of more than 1 MiB, and here all but the smallest."""
    world.side = scenario.LARGE
    world.order = dataclasses.replace(world.order, files_only=True)
    points = ["create_job.after", *chains.draw(seed, *FILES, "spool.keep.before", "spool.sync.after:2")]
    await chains.train(world, points, lambda rounds: scenario.job_text(rounds=rounds))
    await check(world)


@pytest.mark.fault("F4")
@pytest.mark.parametrize("seed", [3])
async def test_killed_while_a_delta_is_made(world: Chain, seed: int) -> None:
    """Each version is the previous one plus an encoded step, which has its own file: the third one."""
    world.side = scenario.LARGE
    third = ["blob.write.after:3", "blob.rename.before:3", "blob.rename.after:3"]
    points = ["create_job.after", *chains.draw(seed, *DELTAS, *third, "commit.model.after", "save.uncharged")]
    await chains.train(world, points, lambda rounds: scenario.job_text(rounds=rounds, more=DOWNLINK))
    await check(world)


@pytest.mark.parametrize("point", SCORES)
async def test_killed_while_a_version_is_scored(world: Chain, point: str) -> None:
    """No chain: the rounds do not wait for the scores, so that a training may end before its server has died."""
    await scenario.train(world, scenario.job_text(rounds=1, more=SCORED), [point])
    assert world.statuses == [KILLED, 0]
    await check(world)


@pytest.mark.fault("F2")
async def test_killed_while_an_update_in_memory_is_freed(world: Chain) -> None:
    """Updates are freed as soon as they are folded."""
    points = chains.of("upload.discard")
    await chains.train(world, points, lambda rounds: 'durability = "memory"\n' + scenario.job_text(rounds=rounds))
    await check(world, kept=False)


async def test_killed_while_the_database_is_upgraded(zygote: Nursery, folder: Path, empty: str) -> None:
    order = Order(folder, empty, folder.parent / "server.log", upgrade=True)
    for crash_at, status in (*((point, KILLED) for point in UPGRADES), ("", 0)):
        process = zygote.start(order.armed(crash_at))
        assert await process.status == status, order.log.read_text()
    world = World(zygote, Order(folder, empty, order.log))
    await scenario.train(world, scenario.job_text(rounds=1))
    await check(world)


# --- every transaction of a training -------------------------------------------------------------------------


@pytest.mark.fault("F1", "F2", "F4", "F5")
@pytest.mark.parametrize("seed", [8])
async def test_killed_around_every_transaction(world: Chain, seed: int) -> None:
    """With one client nothing is concurrent, so the saves of a training are always the same.

    The job starts, the client is selected, begins to upload and has reported, the version is committed and the client
    selected again. A life may begin with a save of its own, so that only the later ones take the job to another step.
    """
    moments = ("save.before", "save.uncommitted", "save.after")
    places = [f"{moment}:{number}" for moment in moments for number in (1, 2, 3)]
    points = [*moments, *chains.draw(seed, *places, *places, *places)]
    await chains.train(world, points, lambda rounds: scenario.job_text(rounds=rounds, goal=1), num_clients=1)
    await check(world)
    assert {"SELECTING", "COLLECTING", "COMMITTING", "COMMITTED"} <= world.phases


# --- in the middle of a round --------------------------------------------------------------------------------


@pytest.mark.fault("F2")
async def test_killed_in_the_middle_of_a_round(world: World) -> None:
    """The round continues: no attempt is lost, and the models are what their updates give, bit for bit (I10)."""
    await scenario.train(world, scenario.job_text(), [""], scenario.kill_in_the_second_round)
    assert world.statuses == [KILLED, 0]
    await check(world)
    _, attempts = await recompute.read(world.order.database)
    assert sorted(attempts) == [(number, 1) for number in range(1, scenario.ROUNDS + 1)]


@pytest.mark.fault("F2")
@pytest.mark.parametrize("name", codecs.CODECS)
async def test_killed_in_the_middle_of_a_round_of_encoded_updates(zygote: Nursery, folder: Path, name: str) -> None:
    """Encoded updates are folded again from the spool; and the step is encoded to the same bytes."""
    world = in_sqlite(zygote, folder)
    text = scenario.job_text(more=f'[compression]\nuplink = {{codec = "{name}"}}\ndownlink = {{codec = "{name}"}}\n')
    await scenario.train(world, text, [""], scenario.kill_in_the_second_round)
    assert world.statuses == [KILLED, 0]
    await check(world)


@pytest.mark.fault("F2")
@pytest.mark.parametrize("rule", ['{name = "krum"}', '{name = "centered-clipping", radius = 1}'])
async def test_killed_in_the_middle_of_a_round_with_a_robust_rule(zygote: Nursery, folder: Path, rule: str) -> None:
    """All updates are read again from the spool; the rule's state and its draws are as without a crash."""
    world, before = in_sqlite(zygote, folder), '[{name = "bucketing", size = 1}, {name = "nearest"}]'
    text = scenario.job_text(more=f"{DOWNLINK}[robust]\nbyzantine = 0\nrule = {rule}\nbefore = {before}\n")
    await scenario.train(world, text, [""], scenario.kill_in_the_second_round)
    assert world.statuses == [KILLED, 0]
    await check(world)


@pytest.mark.fault("F43")
async def test_killed_between_the_close_and_the_commit_of_what_an_outlier_has_left(
    zygote: Nursery, folder: Path
) -> None:
    """The update with the largest norm is dropped in every round; the others' weights are at most the median."""
    world = in_sqlite(zygote, folder)
    bounds = "[updates]\noutlier_factor = 1.0\nmax_weight_factor = 1.0\n"
    points = [*chains.of("commit.model", "commit.state"), "save.uncharged", "save.after"]

    def text(rounds: int) -> str:
        return scenario.job_text(rounds=rounds, more=bounds).replace("min_fraction = 1.0", "min_fraction = 0.5")

    await chains.train(world, points, text)
    await check(world, kept=False)
    _, attempts = await recompute.read(world.order.database)
    for attempt in attempts.values():
        merged = recompute.merged(attempt)
        (dropped,) = [one for one in attempt.assignments if one.reason == "REJECTED_OUTLIER"]
        assert len(merged) == 2
        assert dropped.norm is not None
        assert all(one.norm is not None and one.norm < dropped.norm for one in merged)


# --- with a buffer -------------------------------------------------------------------------------------------


@pytest.mark.fault("F2")
async def test_killed_beside_a_half_full_buffer(world: World) -> None:
    """Assignments outlive the crash and new versions; the models are what stale updates give, bit for bit."""
    text = scenario.buffered_text()
    await scenario.train(world, text, [""], scenario.kill_after_the_second_version, num_clients=4)
    assert world.statuses == [KILLED, 0]
    await check(world)
    _, attempts = await recompute.read(world.order.database)
    assert sorted(attempts) == [(number, 1) for number in range(1, 6)]
    assert any(one.staleness for attempt in attempts.values() for one in attempt.assignments)


@pytest.mark.fault("F4")
@pytest.mark.parametrize("seed", [4])
async def test_killed_while_a_buffer_is_merged(world: Chain, seed: int) -> None:
    often = ["upload.discard.before:3", "upload.discard.after:3", "save.uncommitted:12", "save.after:12"]
    points = chains.draw(seed, *often, "commit.model.before", "spool.discard.before", "save.uncharged")
    await chains.train(world, points, lambda rounds: scenario.buffered_text(2 * rounds), num_clients=4)
    await check(world)


# --- with clocks -----------------------------------------------------------------------------------------


@pytest.mark.fault("F2")
@pytest.mark.parametrize("point", ["", "save.uncommitted:9"])
async def test_killed_between_the_clocks_of_its_clients(world: World, point: str) -> None:
    """No clock is counted twice or lost: each merged update is one, and the checker finds none out of bounds."""
    disturb = scenario.kill_after_the_second_version if not point else None
    await scenario.train(world, scenario.clocks_text(), [point], disturb)
    assert world.statuses == [KILLED, 0]
    await check(world, kept=False)  # what waits when the last version is made is dropped
    job, attempts = await recompute.read(world.order.database)
    assert sorted(attempts) == [(number, 1) for number in range(1, 8)]
    stored = job.row.protocol
    assert stored is not None
    assert sum(clocks_from_builtins(stored).clocks.values()) == 7
