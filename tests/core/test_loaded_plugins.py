"""Plugins that the owner of a process names: from files, modules, installed packages and Python."""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from fedplat import aggregate
from fedplat.config.loaded_plugins import (
    PluginReference,
    PluginVersion,
    decode_with_plugins,
    load_plugins,
    parse_plugins,
)
from fedplat.config.plugins import Plugins, has_absent
from fedplat.errors import JobFileError, PluginError
from fedplat.job import JobSpec, parse_job
from support import plugins
from support.jobs import write_job


class Request(msgspec.Struct, frozen=True):
    spec: JobSpec
    plugins: tuple[PluginReference, ...] = ()


def test_the_entry_point_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = plugins.write_file(tmp_path, name="own_package.py")
    info = tmp_path / "own_package-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-package\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[fedplat.rules]\nscaled = own_package:Scaled\n")
    (info / "top_level.txt").write_text("own_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    digest = sha256(file.read_bytes()).hexdigest()
    try:
        loaded = load_plugins(parse_plugins(["rules.scaled", "codecs.halves=own_package:Halves"]))
    finally:
        sys.modules.pop("own_package", None)
    assert loaded.versions == (
        PluginVersion("codecs", "halves", "1.5", digest),
        PluginVersion("rules", "scaled", "1.5", digest),
    )
    assert loaded.versions[1].short == f"1.5 sha256 {digest[:12]}"
    assert {each.reference for each in loaded.references} == {"own_package:Scaled", "own_package:Halves"}
    assert loaded.names("rules") == ["scaled"]


def test_another_process_imports_the_references(tmp_path: Path) -> None:
    loaded = plugins.load(plugins.write_file(tmp_path), "rules.scaled", "policies.labelled")
    spec = parse_job(write_job("toy", more='[aggregation]\nrule = "scaled"\nfactor = 3.0\n'), loaded.table)
    assert [version.name for version in loaded.find_used(spec)] == ["scaled"]
    content = msgspec.msgpack.encode(Request(spec, loaded.references))
    assert decode_with_plugins(content, Request).spec == spec
    with pytest.raises(msgspec.ValidationError, match="rule = 'scaled': an aggregation rule of this name is not known"):
        decode_with_plugins(msgspec.msgpack.encode(Request(spec)), Request)
    plugins.write_file(tmp_path, "# changed\n")
    with pytest.raises(PluginError, match=r"has changed since the server imported it; restart the server"):
        decode_with_plugins(content, Request)


def test_a_class_has_no_reference_but_a_digest() -> None:
    class Mean(msgspec.Struct, frozen=True):
        def build(self) -> aggregate.Rule:
            return aggregate.weighted_mean()

    loaded = load_plugins({"rules.mean": Mean})
    assert loaded.references == ()
    assert loaded.versions == (PluginVersion("rules", "mean", "", sha256(Path(__file__).read_bytes()).hexdigest()),)


class Halving(msgspec.Struct, frozen=True):
    """An update counts half as much with each version that it is behind."""

    last: int = 100

    def weight(self, staleness: int) -> float:
        return 0.5**staleness if staleness <= self.last else float("nan")


def test_a_staleness_weight() -> None:
    loaded = load_plugins({"staleness.halving": Halving})
    mode = '[mode]\nkind = "buffered"\nconcurrency = 5\n'
    job = write_job("toy", more=f'{mode}max_staleness = 9\nstaleness = {{ kind = "halving" }}\n')
    spec = parse_job(job, loaded.table)
    assert [spec.weight(1.0, behind) for behind in range(3)] == [1.0, 0.5, 0.25]
    assert [version.label for version in loaded.find_used(spec)] == ["staleness.halving"]
    stored = parse_job(job, Plugins(absent=frozenset({("staleness", "halving")})))
    assert has_absent(stored)
    with pytest.raises(PluginError, match=r"weight\(3\) returned nan; expected a finite number of at least 0"):
        parse_job(job.replace('"halving"', '"halving", last = 2'), loaded.table)
    with pytest.raises(JobFileError, match=r"mode.max_staleness = none: expected at most 10000 with the"):
        parse_job(job.replace("max_staleness = 9\n", ""), loaded.table)
