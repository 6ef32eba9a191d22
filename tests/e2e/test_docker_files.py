"""The files that make the images agree with the code, with one another and with the docs; no engine is needed.

What an engine does with them is tried by hand, as docs/docker.md says.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.specifiers import SpecifierSet

from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat_client import Task
from support.images import (
    DOCKERFILES,
    FOLDER,
    ROOT,
    SERVICES,
    VERSION,
    Words,
    instructions,
    last,
    load,
    stages,
    targets,
)

WORKFLOW = ROOT / ".github" / "workflows" / "image.yml"
SBOM = "/sbom.cdx.json"
NEWER = "sha256:" + "ab" * 32

each_dockerfile = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
each_file = pytest.mark.parametrize("path", [*DOCKERFILES, SERVICES], ids=lambda path: path.name)


def copies(words: list[Words]) -> list[Words]:
    return [found for found in words if found[0] == "COPY"]


def origins(words: list[Words]) -> set[str]:
    """The stages from which files are copied."""
    return {found[1].removeprefix("--from=") for found in copies(words) if found[1].startswith("--from=")}


@each_file
def test_linter_finds_nothing(path: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    found = subprocess.run([hadolint, "--no-color", path], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


@each_file
def test_copied_files_exist_and_are_sent_to_the_engine(path: Path) -> None:
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = [source for words in copies(instructions(path)) if "--from=" not in words[1] for source in words[1:-1]]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(source == entry or source.startswith(f"{entry}/") for entry in sent), f"{source} is ignored"


def test_base_image_is_slim_and_pinned_and_has_a_python_that_the_packages_support() -> None:
    bases = {
        words[1]
        for path in (*DOCKERFILES, SERVICES)
        for words in instructions(path)
        if words[0] == "ARG" and "PYTHON=" in words[1]
    }
    assert len(bases) == 1
    match = re.fullmatch(r"PYTHON=python:(\d+\.\d+)-slim@sha256:[0-9a-f]{64}", bases.pop())
    assert match is not None
    for project in ("pyproject.toml", "server/pyproject.toml", "client/pyproject.toml"):
        required: str = tomllib.loads((ROOT / project).read_text())["project"]["requires-python"]
        assert match[1] in SpecifierSet(required), project


@each_file
def test_all_stages_are_made_from_the_base_image(path: Path) -> None:
    made_from = {words[1] for words in instructions(path) if words[0] == "FROM"}
    assert made_from - stages(path).keys() == {"${PYTHON}"}


@each_file
def test_images_run_as_a_numbered_user_that_is_not_root(path: Path) -> None:
    # Kubernetes' runAsNonRoot cannot judge a name.
    for target in targets(path):
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last(stages(path)[target], "USER")[1]), target


@each_dockerfile
def test_whatever_is_installed_is_pinned(path: Path) -> None:
    installs = [" ".join(words) for words in instructions(path) if words[0] == "RUN" and "install" in words]
    pip = [command for line in installs for command in line.split("&&") if "pip install" in command]
    assert len(pip) == 8
    assert all("-c constraints.txt" in command or "--no-deps" in command for command in pip)


@each_dockerfile
def test_only_torch_is_from_its_own_index(path: Path) -> None:
    """With two indexes, pip takes the highest version of any name from either."""
    text = path.read_text()
    assert "--extra-index-url" not in text
    found = [line for line in text.splitlines() if "index-url" in line]
    assert len(found) == 2
    for line in found:
        assert re.fullmatch(
            r'RUN pip install -c constraints\.txt --no-deps \$\{(\w+):\+--index-url "\$\1"\} torch \\', line
        ), line


@each_dockerfile
def test_slim_image_is_the_default_and_has_no_torch(path: Path) -> None:
    slim = path.suffix.removeprefix(".")
    assert list(stages(path))[-1] == slim
    everything = [words for stage in (slim, *origins(stages(path)[slim])) for words in stages(path)[stage]]
    assert not any("torch" in word for words in everything for word in words)


def test_server_has_what_several_daemons_need_and_the_client_has_nothing_more() -> None:
    server = " ".join(word for words in stages(DOCKERFILES[0])["dependencies"] for word in words)
    assert "'./server[dashboard,otel,postgres,s3]'" in server
    client = [word for words in stages(DOCKERFILES[1])["dependencies"] for word in words]
    assert "./client" in client


@each_dockerfile
def test_only_images_for_gpus_have_cuda(path: Path) -> None:
    """An empty index is the default one, whose torch includes CUDA; the others use the index of the CPU build."""
    for target in targets(path):
        words = [word for stage in origins(stages(path)[target]) for found in stages(path)[stage] for word in found]
        has_cuda = target in ("pool-server", "gpu-client")
        assert ("CUDA_INDEX=" in words) == has_cuda
        assert not (has_cuda and "TORCH_INDEX=https://download.pytorch.org/whl/cpu" in words)


@each_dockerfile
def test_each_image_has_the_list_of_what_is_installed_in_it(path: Path) -> None:
    for target in targets(path):
        [listing] = [words for words in copies(stages(path)[target]) if words[2] == SBOM]
        assert listing[-1] == "/usr/share/doc/fedplat/"
        made_by = stages(path)[listing[1].removeprefix("--from=")]
        installed = origins(stages(path)[target]) - {listing[1].removeprefix("--from=")}
        dependencies = next(words[1] for words in reversed(made_by) if words[0] == "FROM")
        assert installed == {dependencies, *origins(made_by)}, target
        assert made_by[-1][:3] == ["RUN", "/opt/tools/bin/cyclonedx-py", "environment"]
        assert made_by[-1][-3:] == ["-o", SBOM, "/opt/fedplat/bin/python"]


@each_dockerfile
def test_each_image_has_labels(path: Path) -> None:
    titles: set[str] = set()
    for target in targets(path):
        words = [word for found in stages(path)[target] if found[0] == "LABEL" for word in found[1:]]
        names = {word.partition("=")[0].removeprefix("org.opencontainers.image.") for word in words if "=" in word}
        assert names == {"title", "description", "version", "revision", "source", "licenses"}, target
        assert f'org.opencontainers.image.title="fedplat-{target}"' in words
        assert ["ARG", f"VERSION={VERSION}"] in stages(path)[target]
        titles.update(word for word in words if ".title=" in word)
    assert len(titles) == len(targets(path)) == 4


@each_dockerfile
def test_nothing_with_a_compiler_comes_along(path: Path) -> None:
    text = path.read_text()
    assert "apt-get" not in text
    assert "build-essential" not in text


def test_server_listens_where_it_is_exposed_and_checked() -> None:
    text = DOCKERFILES[0].read_text()
    port = re.findall(r"^EXPOSE (\d+)$", text, re.MULTILINE)
    assert len(port) == 1
    assert f"FEDPLAT_LISTEN=0.0.0.0:{port[0]}" in text
    assert f'"127.0.0.1:{port[0]}"' in text
    assert 'exec fedplat-server run \\"$@\\"' in text, "without exec, SIGTERM does not reach the daemon"


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """An engine that writes its arguments into a file, one line for each call."""
    path = tmp_path / "engine"
    path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    path.chmod(0o755)
    return path


def build(engine: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ENGINE": str(engine)}
    command = [FOLDER / "build.sh", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_script_builds_every_target_that_it_is_asked_for(engine: Path) -> None:
    everything = {target: path for path in (*DOCKERFILES, SERVICES) for target in targets(path)}
    done = build(engine, *everything, "--", "--platform", "linux/arm64")
    assert done.returncode == 0, done.stderr
    calls = [line for line in engine.with_name("calls").read_text().splitlines() if " build " in f" {line}"]
    builds = [line for line in calls if "--target" in line]
    assert len(builds) == len(everything)
    for (target, path), line in zip(everything.items(), builds, strict=True):
        assert f"-f docker/{path.name} --target {target} -t fedplat-{target}:{VERSION} " in line
        assert f"--build-arg VERSION={VERSION} " in line
        assert line.endswith("--platform linux/arm64 .")


def test_script_builds_what_needs_no_gpu_by_default(engine: Path) -> None:
    assert build(engine).returncode == 0
    built = re.findall(r"--target (\S+)", engine.with_name("calls").read_text())
    assert sorted(built) == sorted({*targets(DOCKERFILES[0]), *targets(DOCKERFILES[1])} - {"pool-server", "gpu-client"})


def test_script_names_the_targets_when_it_is_asked_for_another_one(engine: Path) -> None:
    done = build(engine, "sever")
    assert done.returncode == 2
    assert "no target sever; expected some of: server digits-server" in done.stderr
    assert not engine.with_name("calls").exists()


@pytest.fixture
def pinned(tmp_path: Path) -> Path:
    """A copy of docker/, with a `docker` whose registry has a newer image of Python, and the pinned ones otherwise."""
    folder = tmp_path / "copy"
    shutil.copytree(FOLDER, folder)
    command = folder / "docker"
    command.write_text(
        '#!/bin/sh\n[ "$1 $2 $3" = "buildx imagetools inspect" ] || exit 3\n'
        f'case $4 in python:*) echo {NEWER} ;; *) grep -rhoE "$4@sha256:[0-9a-f]{{64}}" {FOLDER} | head -n 1 | '
        "sed 's/.*@//' ;; esac\n"
    )
    command.chmod(0o755)
    return folder


def renew(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    command = [folder / "renew.sh", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_an_image_that_its_registry_has_renewed_is_found_and_written(pinned: Path) -> None:
    before = {path.name: path.read_text() for path in FOLDER.iterdir() if path.is_file()}
    found = renew(pinned)
    assert found.returncode == 1
    assert f"python:3.11-slim has changed to {NEWER}" in found.stdout
    assert found.stdout.count("is pinned as its registry has it") == 3  # those of compose.scale.yaml
    assert renew(pinned, "--write").returncode == 0
    changed = {name for name, text in before.items() if (pinned / name).read_text() != text}
    assert changed == {path.name for path in (*DOCKERFILES, SERVICES)}
    for name in changed:
        assert re.sub(r"sha256:\w+", NEWER, before[name]) == (pinned / name).read_text()
    assert renew(pinned).returncode == 0


def test_a_registry_without_an_answer_changes_nothing(pinned: Path) -> None:
    (pinned / "docker").write_text("#!/bin/sh\necho '<nil>'\n")
    before = (pinned / "Dockerfile.server").read_text()
    found = renew(pinned, "--write")
    assert (found.returncode, found.stdout) == (2, "")
    assert "has no digest for chrislusf/seaweedfs:4.48, but <nil>" in found.stderr
    assert (pinned / "Dockerfile.server").read_text() == before


def test_every_image_of_others_is_pinned_and_renewed_each_week() -> None:
    for path in (*FOLDER.glob("Dockerfile.*"), *FOLDER.glob("compose*.yaml")):
        for name in re.findall(r"(?:^ARG PYTHON=|^\s+image: \$\{\w+_IMAGE:-)([^}\s]+)", path.read_text(), re.MULTILINE):
            assert re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", name), f"{path.name}: {name}"
    workflow = load(WORKFLOW.with_name("renew.yml"))
    (event,) = workflow[True]["schedule"]  # YAML 1.1 reads the key `on` as true
    *_, month, weekday = event["cron"].split()
    assert (month, len(weekday)) == ("*", 1)
    commands = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    assert "docker/renew.sh" in commands
    assert any("pip-audit --requirement constraints.txt" in command for command in commands)


def test_workflow_builds_targets_that_exist_for_both_architectures() -> None:
    workflow = load(WORKFLOW)
    job = workflow["jobs"]["image"]
    matrix = job["strategy"]["matrix"]["include"]
    assert {"server", "client", "pool-server", "gpu-client"} <= {row["target"] for row in matrix}
    for row in matrix:
        assert row["target"] in targets(ROOT / row["dockerfile"]), row
    [step] = [step for step in job["steps"] if step.get("id") == "build"]
    options = step["with"]
    assert options["platforms"] == "linux/amd64,linux/arm64"
    assert (options["sbom"], options["provenance"]) == (True, "mode=max")
    arguments = {line.partition("=")[0] for line in options["build-args"].splitlines()}
    assert arguments == {"VERSION", "REVISION", "SOURCE"}
    assert options["push"] == "${{ inputs.push }}"
    caller = load(WORKFLOW.with_name("images.yml"))
    assert [job["with"]["push"] for job in caller["jobs"].values()] == [False, True]
    assert caller["jobs"]["publish"]["if"] == "github.ref_type == 'tag'"
    for pattern in caller[True]["pull_request"]["paths"]:  # YAML 1.1 reads the key `on` as true
        assert any(ROOT.glob(pattern)), pattern


def test_workflow_names_no_moving_version() -> None:
    assert "latest" not in WORKFLOW.read_text()


def test_docs_name_this_version() -> None:
    text = (ROOT / "docs" / "docker.md").read_text()
    assert set(re.findall(r"fedplat-(?:server|client):([\w.]+)", text)) == {VERSION}


def test_trainer_of_the_docs_trains_the_job_of_the_docs() -> None:
    text = (ROOT / "docs" / "docker.md").read_text()
    blocks: dict[str, list[str]] = {}
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        blocks.setdefault(language, []).append(block)
    trainer: dict[str, Any] = {}
    model: dict[str, Any] = {}
    exec(blocks["python"][0], trainer)
    exec(blocks["python"][1], model)
    job = parse_job(blocks["toml"][0])
    assert f'"{job.trainer}=trainer:train"' in blocks["dockerfile"][0]
    assert f"enrollment create --population {job.population} --uses 3" in text
    parameters = Parameters.from_arrays(model["initial"]())
    for number in range(job.rounds):
        task = Task(name=job.trainer, parameters=parameters, config=job.config, round=number + 1)
        parameters = trainer["train"](task).parameters
    assert isinstance(parameters, Parameters)
    np.testing.assert_allclose([*parameters["slope"], *parameters["intercept"]], [2.0, 1.0], atol=0.01)
