"""The server dies at every crash point; nothing is lost, and the models are the same bit for bit.

The points come from the source text, so a new one is tested automatically. `ELSEWHERE` maps those that a plain
training does not reach to a scenario that does; a run that does not die where it should is a failure.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import pytest

from fedplat import codecs
from fedplat.rounds.clock_set import clocks_from_builtins
from fedplat_server.verify.checker import verify
from support.crash import evaluator, points, recompute, scenario
from support.crash.nursery import Nursery, Order
from support.crash.scenario import KILLED, World
from support.daemons import initial_model

POINTS = points.all_points()
DOWNLINK = '[compression]\ndownlink = {codec = "eden"}\n'
EVALUATOR = f"{evaluator.__file__}:score"


@pytest.fixture(params=["sqlite", "postgres"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database of each kind."""
    if request.param == "postgres":
        return request.getfixturevalue("empty_postgres")
    return f"sqlite:///{tmp_path / 'empty.sqlite'}"


@pytest.fixture
async def world(zygote: Nursery, folder: Path, database: str) -> World:
    return World(zygote, Order(folder, database, folder.parent / "server.log", {"score": EVALUATOR}))


def in_sqlite(zygote: Nursery, folder: Path) -> World:
    """A world on SQLite, for tests that do not depend on the database."""
    database = f"sqlite:///{folder / 'fedplat.sqlite'}"
    return World(zygote, Order(folder, database, folder.parent / "server.log"))


async def check(world: World, *, kept: bool = True) -> None:
    """Everything that must hold after a training with any number of crashes; `kept`: all receipts were merged."""
    order = world.order
    report = await verify(order.database, order.data_dir)
    assert (report.findings, report.notes) == ([], [])
    result = await recompute.read(order.database)
    recompute.check_versions(world, result, order.data_dir)
    recompute.check_receipts(world, result, kept=kept)
    left = [path for path in (order.data_dir / "uploads").rglob("*") if path.is_file()]
    assert left == [], "updates are left that are not needed"


# --- every point, the first time that it is reached ----------------------------------------------------------


async def training(world: World, point: str) -> None:
    """Three rounds of three clients, from an empty server on."""
    await scenario.train(world, scenario.job_text(), [point])
    assert world.statuses == [KILLED, 0]


async def scored(world: World, point: str) -> None:
    """The server scores what it commits."""
    await scenario.train(world, scenario.job_text(rounds=1, more='[evaluation]\nserver = "score"\n'), [point])
    assert world.statuses == [KILLED, 0]


async def restarted(world: World, point: str) -> None:
    """The server dies in a round, and again when it starts; one stored model belongs to no job."""

    async def leave_something_and_die(world: World) -> None:
        await world.ask(lambda site: site.operator.upload(initial_model()))
        await scenario.kill_in_the_second_round(world)

    await scenario.train(world, scenario.job_text(), ["", point], leave_something_and_die)
    assert world.statuses == [KILLED, KILLED, 0]


async def in_memory(world: World, point: str) -> None:
    """Updates are freed as soon as they are folded."""
    await scenario.train(world, 'durability = "memory"\n' + scenario.job_text(), [point])
    assert world.statuses == [KILLED, 0]


async def with_deltas(world: World, point: str) -> None:
    """Each version is the previous one plus an encoded step, which has its own file."""
    await scenario.train(world, scenario.job_text(more=DOWNLINK), [point])
    assert world.statuses == [KILLED, 0]


ELSEWHERE: Mapping[str, Callable[[World, str], Awaitable[None]]] = {
    "metrics.before": scored,
    "metrics.after": scored,
    "blob.remove_orphan.before": restarted,
    "blob.remove_orphan.after": restarted,
    "commit.delta.before": with_deltas,
    "commit.delta.after": with_deltas,
}
BEFORE_THERE_IS_A_SERVER = ["schema.upgrade.before", "schema.upgrade.uncommitted", "schema.upgrade.after"]


RETENTION = [point for point in POINTS if point.startswith("retention.")]
"""These are in test_retention.py: versions that are not kept cannot be recomputed."""
DELIVERY = [point for point in POINTS if point.startswith("delivery.")]
"""These are in test_deliveries.py: without a webhook they are not reached."""
OBJECTS = [point for point in POINTS if point.startswith("object.")]
"""These are in test_object_store.py: models in a folder do not reach them."""
STORED_UPDATES = [point for point in POINTS if point.startswith("spool_store.")]
"""These are in test_object_spool.py: a spool in a folder does not reach them."""
OTHERS = {*BEFORE_THERE_IS_A_SERVER, *RETENTION, *DELIVERY, *OBJECTS, *STORED_UPDATES}


@pytest.mark.parametrize("point", [one for one in POINTS if one not in OTHERS])
async def test_killed_at_every_point(world: World, point: str) -> None:
    play = ELSEWHERE.get(point, training)
    await play(world, point)
    await check(world)


@pytest.mark.parametrize("point", ["upload.discard.before", "upload.discard.after"])
async def test_killed_while_an_update_in_memory_is_freed(world: World, point: str) -> None:
    await in_memory(world, point)
    await check(world, kept=False)


@pytest.mark.parametrize("point", BEFORE_THERE_IS_A_SERVER)
async def test_killed_while_the_database_is_upgraded(zygote: Nursery, folder: Path, empty: str, point: str) -> None:
    order = Order(folder, empty, folder.parent / "server.log", upgrade=True)
    for crash_at, status in ((point, KILLED), ("", 0)):
        process = zygote.start(order.armed(crash_at))
        assert await process.status == status, order.log.read_text()
    world = World(zygote, Order(folder, empty, order.log))
    await scenario.train(world, scenario.job_text(rounds=1))
    await check(world)


def test_no_point_is_listed_that_is_not_there() -> None:
    assert {*ELSEWHERE, *BEFORE_THERE_IS_A_SERVER} <= {*POINTS}
    assert len(POINTS) >= 40


# --- every transaction of a training -------------------------------------------------------------------------

# With one client nothing is concurrent, so the saves of a training are always the same: 1 the job starts, 2 the
# client is selected, 3 it begins to upload, 4 it has reported, 5 the version is committed and the client selected
# again, 6 and 7 as 3 and 4, 8 the last version is committed.
SELECTING, COLLECTING, COMMITTING = (1, 2), (3, 4, 6, 7), (5, 8)
ALL = ("save.before", "save.uncommitted", "save.after")


def _around(names: Sequence[str], numbers: Sequence[int]) -> list[str]:
    return [f"{name}:{number}" for number in numbers for name in names]


@pytest.mark.parametrize(
    "point",
    [
        *(pytest.param(one, marks=pytest.mark.fault("F1")) for one in _around(ALL, SELECTING)),
        *(pytest.param(one, marks=pytest.mark.fault("F2")) for one in _around(ALL, COLLECTING)),
        *(pytest.param(one, marks=pytest.mark.fault("F4")) for one in _around(ALL[:2], COMMITTING)),
        *(pytest.param(one, marks=pytest.mark.fault("F5")) for one in _around(ALL[2:], COMMITTING)),
    ],
)
async def test_killed_around_every_transaction(world: World, point: str) -> None:
    await scenario.train(world, scenario.job_text(rounds=2, goal=1), [point], num_clients=1)
    assert world.statuses == [KILLED, 0]
    await check(world)


# --- while a version is made ---------------------------------------------------------------------------------

# The first blob is the initial model, the second the first version, the third its optimizer's state.
AGGREGATED = [
    "commit.model.before",
    *("blob.write.before:2", "blob.write.after:2", "blob.fsync.before:2", "blob.fsync.after:2"),
    *("blob.new_folder.before:2", "blob.new_folder.after:2", "blob.rename.before:2"),
]
RENAMED = [
    *("blob.rename.after:2", "blob.folder_sync.before:2", "blob.folder_sync.after:2", "commit.model.after"),
    *("commit.state.before", "blob.rename.before:3", "blob.rename.after:3", "commit.state.after"),
]


@pytest.mark.parametrize(
    "point",
    [
        *(pytest.param(point, marks=pytest.mark.fault("F3")) for point in AGGREGATED),
        *(pytest.param(point, marks=pytest.mark.fault("F4")) for point in RENAMED),
    ],
)
async def test_killed_while_a_version_is_made(world: World, point: str) -> None:
    await training(world, point)
    await check(world)


# The fourth blob is the delta.
@pytest.mark.fault("F4")
@pytest.mark.parametrize("point", ["blob.write.after:4", "blob.rename.before:4", "blob.rename.after:4"])
async def test_killed_while_a_delta_is_written(zygote: Nursery, folder: Path, point: str) -> None:
    world = in_sqlite(zygote, folder)
    await with_deltas(world, point)
    await check(world)


# --- when it starts again ------------------------------------------------------------------------------------

AT_THE_START = ["spool.keep.before", "spool.keep.after", "save.before", "save.uncommitted", "save.after"]


@pytest.mark.fault("F2")
@pytest.mark.parametrize("point", AT_THE_START)
async def test_killed_again_when_it_starts(world: World, point: str) -> None:
    await restarted(world, point)
    await check(world)


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


AFTER_THE_CLOSE = ["commit.model.before", "commit.model.after", "commit.state.after", "save.before:9", "save.after:9"]


@pytest.mark.fault("F43")
@pytest.mark.parametrize("point", AFTER_THE_CLOSE)
async def test_killed_between_the_close_and_the_commit_of_what_an_outlier_has_left(
    zygote: Nursery, folder: Path, point: str
) -> None:
    """The update with the largest norm is dropped in every round; the others' weights are at most the median."""
    world = in_sqlite(zygote, folder)
    bounds = "[updates]\noutlier_factor = 1.0\nmax_weight_factor = 1.0\n"
    text = scenario.job_text(more=bounds).replace("min_fraction = 1.0", "min_fraction = 0.5")
    await scenario.train(world, text, [point])
    assert world.statuses == [KILLED, 0]
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


IN_A_BUFFER = ["commit.model.before", "save.uncommitted:12", "save.after:12", "upload.discard.before:3"]


@pytest.mark.fault("F4")
@pytest.mark.parametrize("point", [*IN_A_BUFFER, "upload.discard.after:3", "spool.discard.before"])
async def test_killed_while_a_buffer_is_merged(zygote: Nursery, folder: Path, point: str) -> None:
    world = in_sqlite(zygote, folder)
    await scenario.train(world, scenario.buffered_text(), [point], num_clients=4)
    assert world.statuses == [KILLED, 0]
    await check(world)


# --- with clocks -----------------------------------------------------------------------------------------


@pytest.mark.fault("F2")
@pytest.mark.slow  # tests/core/rounds/test_machine.py has the crashes of such jobs without processes
@pytest.mark.parametrize("point", ["", "save.uncommitted:9"])
async def test_killed_between_the_clocks_of_its_clients(world: World, point: str) -> None:
    """No clock is counted twice or lost: each merged update is one, and the checker finds none out of bounds."""
    disturb = scenario.kill_after_the_second_version if not point else None
    await scenario.train(world, scenario.clocks_text(), [point], disturb)
    assert world.statuses == [KILLED, 0]
    await check(world, kept=False)  # what waits when the last version is made is dropped
    job, attempts = await recompute.read(world.order.database)
    assert sorted(attempts) == [(number, 1) for number in range(1, 8)]
    stored = job.row.clocks
    assert stored is not None
    assert sum(clocks_from_builtins(stored).clocks.values()) == 7


# --- the list itself -----------------------------------------------------------------------------------------


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
