"""What every store keeps of a job's plugins, and how it reads such a job without their code."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedplat.config.loaded_plugins import PluginVersion, load_plugins
from fedplat.config.plugins import BUILTIN, has_absent, name_of
from fedplat.errors import PluginError
from fedplat.job import parse_job
from fedplat.rounds import JobState, ModelVersion
from fedplat.rounds.events import JobAction, OperatorCommand
from fedplat_server.database.store import Store, open_store
from support import plugins
from support.store.driver import JOB_FILE, Driver, digest_of

TEXT = JOB_FILE + '[aggregation]\nrule = "scaled"\nfactor = 3.0\n[compression]\nuplink = { codec = "halves" }\n'


async def test_versions_are_kept_and_replaced(store: Store, database: str, tmp_path: Path) -> None:
    loaded = plugins.load(plugins.write_file(tmp_path), "rules.scaled", "codecs.halves")
    spec = parse_job(TEXT, loaded.table)
    assert loaded.find_used(spec) == loaded.versions
    state = JobState("j", spec, ModelVersion(0, 0, 0, digest_of(0), 1000), plugins=loaded.versions)

    without = await store.jobs.create_job(state, TEXT, "a key of the job")
    assert without.state.plugins == loaded.versions
    assert without.problem.startswith("compression.uplink.codec = 'halves': expected one of none, bf16")
    assert has_absent(without.state.spec)
    assert name_of(without.state.spec.aggregation) == "scaled"
    assert without.state.spec.compression.names == {"halves"}
    with pytest.raises(PluginError, match=r"the plugin rules\.scaled is not available in this process"):
        without.state.spec.aggregation.build()

    reader = await open_store(database, plugins=loaded.table)
    (record,) = await reader.jobs.load_jobs()
    assert (record.state, record.problem) == (state, "")
    other = tuple(PluginVersion(each.kind, each.name, "2.0") for each in loaded.versions)
    driver = Driver(reader, check=False)
    driver.coordinator.add(record.state)
    (verdict,) = await driver.send(OperatorCommand("j", JobAction.START, other))
    assert verdict.accepted
    (record,) = await reader.jobs.load_jobs()
    assert record.state.plugins == other
    await reader.close()


async def test_a_job_without_plugins_has_none(store: Store) -> None:
    await Driver(store).create("j")
    (record,) = await store.jobs.load_jobs()
    assert (record.state.plugins, record.problem) == ((), "")
    assert load_plugins({}).table == BUILTIN
