"""What a user of the wheels does: each check runs the commands of a page in empty environments."""

from __future__ import annotations

import contextlib
import http.cookiejar
import json
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Generator
from pathlib import Path

from distributions.building import require
from distributions.environments import Machine
from support.ports import free_port
from support.projects import MAX_LIGHT, ROOT

PROJECT = "tumors"
_TYPED = """\
import fedplat
import fedplat_server
from fedplat.job import JobSpec, parse_job
from fedplat_client import TrainResult

job: JobSpec = parse_job("")
rounds: int = job.rounds
version: str = fedplat.__version__ + fedplat_server.__version__
wrong: str = job.rounds  # error
TrainResult(parameters={}, num_examples="many")  # error
"""


def check_light(python: Path) -> str:
    """The client's environment has few distributions, and none of ours but two."""
    code = "import importlib.metadata as m; print(*sorted(d.name for d in m.distributions()))"
    names = subprocess.run([str(python), "-I", "-c", code], check=True, capture_output=True, text=True).stdout.split()
    require(len(names) <= MAX_LIGHT, f"fedplat-client installs {len(names)} distributions: {names}")
    require("fedplat-server" not in names, "fedplat-client installs the server")
    return f"{len(names)} distributions"


def check_types(python: Path, folder: Path) -> str:
    """A type checker that infers nothing from code knows the types of the installed packages."""
    (folder / "typed.py").write_text(_TYPED)
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict", "useLibraryCodeForTypes": false}')
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", str(python), "--project", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    found = {
        each["range"]["start"]["line"] + 1: each["message"] for each in json.loads(done.stdout)["generalDiagnostics"]
    }
    expected = [number for number, line in enumerate(_TYPED.splitlines(), 1) if line.endswith("# error")]
    require(sorted(found) == expected, f"expected errors in lines {expected} of typed.py; found {found}")
    return "pyright finds both mistakes"


def check_project(operator: Machine, client: Machine, folder: Path) -> str:
    """`fedplat new`, and the README of the project: a simulation, then a server, two clients and an operator."""
    operator.run(f"fedplat new {PROJECT}", folder)
    project = folder / PROJECT
    local, daemon, operation = re.findall(r"```bash\n(.*?)```", (project / "README.md").read_text(), flags=re.DOTALL)
    _, simulate = local.splitlines()  # the tests need pytest and the client in one environment
    summary = json.loads(operator.run(f"{simulate} --no-plots --json", project))["summary"]
    require(summary["last"]["value"] > 0.9, f"the simulation ends with {summary['last']}")
    run_folder = next((project / "runs").iterdir())
    pages = f"127.0.0.1:{free_port()}"
    show = f"fedplat dashboard {run_folder.relative_to(project)} --listen {pages} --no-browser"
    with operator.started(show, project) as log:
        check_dashboard(log.wait_for(f"http://{pages}/login?code="), PROJECT)
    both = Machine(client.home, (*operator.path, *client.path))  # the operator's commands, the clients' Python
    with started_with_pages(operator, daemon, project):
        both.run(operation, project)
    require((project / "final.safetensors").stat().st_size > 0, "there is no model")
    return f"accuracy {summary['last']['value']:.2f} simulated, and a model of two clients"


@contextlib.contextmanager
def started_with_pages(machine: Machine, command: str, folder: Path) -> Generator[None]:
    """Runs `fedplat-server dev` on other ports; its dashboard answers."""
    pages = f"127.0.0.1:{free_port()}"
    with machine.started(f"{command.strip()} --listen 127.0.0.1:{free_port()} --dashboard {pages}", folder) as log:
        check_dashboard(log.wait_for(f"http://{pages}/login?code="))
        yield


def check_readme(machine: Machine, folder: Path) -> str:
    """The README's files and terminals: `fedplat-server dev` with its dashboard, two clients, a job and its model."""
    text = (ROOT / "README.md").read_text()
    for name, content in re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", text, flags=re.DOTALL):
        (folder / name).write_text(content)
    _, daemon, operation = re.findall(r"(?<!-->\n)```bash\n(.*?)```", text, flags=re.DOTALL)
    with started_with_pages(machine, daemon, folder):
        machine.run(operation, folder)
    require((folder / "final.safetensors").stat().st_size > 0, "there is no model")
    return "a model of two clients, and the dashboard"


def check_demo(machine: Machine, folder: Path) -> str:
    """The files of examples/digits as a user's own: one server, ten clients, to the end."""
    shutil.copytree(ROOT / "examples" / "digits", folder / "digits", ignore=shutil.ignore_patterns("__pycache__"))
    last = machine.run("python digits/demo.py", folder).splitlines()[-1]
    require(last.startswith("DEMO OK "), f"the demo ends with: {last}")
    require((folder / "runs/demo/model.safetensors").stat().st_size > 0, "there is no model")
    return last


def check_origin(python: Path) -> str:
    """The packages are those of the environment, not of the repository.

    It also imports what the demo needs once, so that its ten clients do not all compile PyTorch at the same time.
    """
    code = "import sys, fedplat_client.trainers.torch, fedplat_server.daemon, matplotlib.pyplot, sklearn.datasets\n"
    code += "print(*(sys.modules[name].__file__ for name in ('fedplat', 'fedplat_client', 'fedplat_server')))"
    files = subprocess.run([str(python), "-I", "-c", code], check=True, capture_output=True, text=True).stdout.split()
    require(all(Path(file).is_relative_to(python.parents[1]) for file in files), f"the packages are {files}")
    return "no file of the repository"


def check_dashboard(address: str, title: str = "Overview") -> None:
    """Signs in with the printed code, as a browser does, and loads the first page with its files."""
    parts = urllib.parse.urlsplit(address)
    origin = f"{parts.scheme}://{parts.netloc}"
    # A browser sends secure cookies to loopback addresses, also without TLS.
    policy = http.cookiejar.DefaultCookiePolicy(secure_protocols=("https", "http"))
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar(policy)))
    form = urllib.parse.urlencode({"code": urllib.parse.parse_qs(parts.query)["code"][0], "next": ""})
    request = urllib.request.Request(f"{origin}/login", form.encode(), {"Origin": origin})
    with opener.open(request, timeout=60) as response:
        page = response.read().decode()
    require(f"<h1>{title}" in page, f"the dashboard does not begin with {title}: {page}")
    linked: list[str] = re.findall(r'(?:href|src)="(/static/[^"]+)"', page)
    require(len(linked) > 2, f"the page names {linked}")
    for path in linked:
        with opener.open(f"{origin}{path}", timeout=60) as response:
            require(len(response.read()) > 100, f"{path} is empty")
