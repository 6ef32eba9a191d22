"""The release workflow calls what exists, pins every action, and gives each job only the permissions that it needs."""

from __future__ import annotations

import re
from typing import Any

import yaml

from support.projects import PROJECTS, ROOT

PATH = ROOT / ".github" / "workflows" / "release.yml"
TEXT = PATH.read_text()
WORKFLOW: dict[Any, Any] = yaml.safe_load(TEXT)
JOBS: dict[str, Any] = WORKFLOW["jobs"]
PAGE = (ROOT / "docs" / "releasing.md").read_text()


def steps_of(job: str) -> list[dict[str, Any]]:
    return JOBS[job]["steps"]


def test_every_action_is_pinned_by_commit() -> None:
    used = [step["uses"] for job in JOBS for step in steps_of(job) if "uses" in step]
    assert len(used) == 5
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
        assert re.search(rf"{re.escape(action)} # v\d+\.\d+\.\d+$", TEXT, re.MULTILINE), action


def test_what_it_runs_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    scripts = [step["run"] for job in JOBS for step in steps_of(job) if "run" in step]
    targets = [target for script in scripts for target in re.findall(r"\bmake (\S+)", script)]
    assert targets == ["dist"]
    recipe = re.search(
        r"^dist: .*\n\t\$\(BIN\)/python (\S+) \$\(if \$\(TAG\),--tag \$\(TAG\)\)$", makefile, re.MULTILINE
    )
    assert recipe is not None
    assert (ROOT / recipe[1]).exists()
    assert not [script for script in scripts if "${{" in script]  # a tag's name is data, never a part of a script


def test_the_published_files_are_the_tested_ones() -> None:
    """They are built in one job, and only passed on in the other."""
    assert JOBS["publish"]["needs"] == "build"
    assert JOBS["publish"]["if"] == "github.event_name == 'push'"
    assert WORKFLOW[True] == {"push": {"tags": ["v*"]}, "workflow_dispatch": None}  # YAML 1.1 reads `on` as true
    (saved,) = [step["with"] for step in steps_of("build") if "upload-artifact" in step.get("uses", "")]
    (loaded,) = [step["with"] for step in steps_of("publish") if "download-artifact" in step.get("uses", "")]
    assert saved["name"] == loaded["name"]
    assert saved["path"].split() == ["dist/*.whl", "dist/*.tar.gz"]
    assert saved["if-no-files-found"] == "error"


def test_three_projects_are_published_with_attestations_and_without_secrets() -> None:
    projects = JOBS["publish"]["strategy"]["matrix"]["project"]
    assert projects == [project.name for project in PROJECTS]
    assert all(f"`{project}`" in PAGE for project in projects)
    assert PATH.name in PAGE
    assert steps_of("publish")[-1]["with"] == {"attestations": True}
    assert "secrets." not in TEXT
    assert WORKFLOW["permissions"] == {}
    assert JOBS["build"]["permissions"] == {"contents": "read"}
    assert JOBS["publish"]["permissions"] == {"id-token": "write"}
