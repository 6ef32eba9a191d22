"""Three distributions of one version; only the three packages are importable; the stubs are those of proto/."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import util
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = ("pyproject.toml", "client/pyproject.toml", "server/pyproject.toml")


def project(path: str) -> dict[str, object]:
    return tomllib.loads((ROOT / path).read_text())["project"]


def requirements(path: str) -> list[Requirement]:
    table = tomllib.loads((ROOT / path).read_text())["project"]
    extras = [text for extra in table.get("optional-dependencies", {}).values() for text in extra]
    return [Requirement(text) for text in [*table["dependencies"], *extras]]


def test_versions_are_equal() -> None:
    import fedplat
    import fedplat_client
    import fedplat_server

    versions = {project(path)["version"] for path in PROJECTS}
    versions |= {fedplat.__version__, fedplat_client.__version__, fedplat_server.__version__}
    assert len(versions) == 1
    for path in PROJECTS[1:]:
        pins = [str(r.specifier) for r in requirements(path) if r.name == "fedplat"]
        assert set(pins) == {f"=={versions.copy().pop()}"}


@pytest.mark.parametrize("name", ["server", "client", "proto", "docker", "tests", "examples"])
def test_folders_are_not_importable(name: str) -> None:
    """Ours are not: another distribution may well have installed a package `examples`."""
    code = f"import importlib.util; print(importlib.util.find_spec({name!r}))"
    found = subprocess.run([sys.executable, "-I", "-c", code], cwd="/", check=True, capture_output=True, text=True)
    assert str(ROOT / name) not in found.stdout


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {Requirement(line).name.lower().replace("_", "-") for line in lines if line and not line.startswith("#")}
    named = {r.name.lower().replace("_", "-") for path in PROJECTS for r in requirements(path)}
    assert named - {"fedplat"} <= pinned


def test_installed_versions_are_the_pinned_ones() -> None:
    """Else the tests would prove something about other versions than the documented ones."""
    from importlib import metadata

    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            try:
                installed = metadata.version(requirement.name)
            except metadata.PackageNotFoundError:
                continue  # a pin for an optional part that is not installed here
            assert requirement.specifier.contains(installed, prereleases=True), f"{requirement.name} {installed}"


def test_stubs_are_those_of_the_protocol(tmp_path: Path) -> None:
    protos = sorted((ROOT / "proto").rglob("*.proto"))
    plugins = [
        f"--plugin=protoc-gen-{name}={Path(sys.executable).parent / f'protoc-gen-{name}'}"
        for name in ("mypy", "mypy_grpc")
    ]
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "proto"), *plugins, *outputs]
    subprocess.run([*command, *map(str, protos)], check=True, capture_output=True)
    generated = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*_pb2*"))
    assert len(generated) == 4 * len(protos)
    for path in generated:
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), f"{path} is out of date: make proto"


def test_no_file_is_too_long() -> None:
    """At most 500 lines, or the docstring gives the reason: past 400 or so, look for the missing concept."""
    for package in ("fedplat", "server/fedplat_server", "client/fedplat_client", "examples", "benchmarks", "tests"):
        for path in (ROOT / package).rglob("*.py"):
            if "_pb2" not in path.name:
                text = path.read_text()
                assert text.count("\n") <= 500 or "lines because" in text[:1500], path


def test_the_packages_are_found() -> None:
    for name in ("fedplat", "fedplat_server", "fedplat_client"):
        assert util.find_spec(name) is not None


@pytest.mark.parametrize("path", PROJECTS)
def test_every_distribution_has_the_license(path: str) -> None:
    assert project(path)["license"] == "Apache-2.0"
    assert project(path)["license-files"] == ["LICENSE"]
    assert (ROOT / path).with_name("LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
