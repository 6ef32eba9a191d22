"""The `pyproject.toml` of an app: what is read, and one sentence for each mistake."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from fedplat.errors import FedplatError, FlowerError, MissingExtraError
from fedplat.flower import app as flower_app
from support import flower

COMPONENTS = '[tool.flwr.app.components]\nserverapp = "a.b:app"\nclientapp = "a.c:app"\n'


def read(folder: Path, text: str) -> flower_app.FlowerApp:
    (folder / "pyproject.toml").write_text(text)
    return flower_app.read_app(folder)


def test_an_app_is_read_without_being_imported(tmp_path: Path) -> None:
    config = "[tool.flwr.app.config]\nlr = 0.1\nrounds = 3\nfast = true\nname = 'x'\nopt.inner.beta = 1\n"
    options = "[tool.flwr.federations]\ndefault = 'sim'\n[tool.flwr.federations.sim.options]\nnum-supernodes = 4\n"
    app = read(tmp_path, f"[project]\nname = 'digits'\n{COMPONENTS}{config}{options}")
    assert (app.name, app.serverapp, app.clientapp, app.num_clients) == ("digits", "a.b:app", "a.c:app", 4)
    assert app.run_config == {"lr": 0.1, "rounds": 3, "fast": True, "name": "x", "opt.inner.beta": 1}


@pytest.mark.parametrize(
    "federations",
    [
        "",
        "default = 'gone'",
        "default = 3",
        "sim.options = 3",
        "sim.options.num-supernodes = 'four'",
        "sim.options.num-supernodes = true",
        "sim.options.num-supernodes = -1",
    ],
)
def test_the_default_number_of_clients(federations: str, tmp_path: Path) -> None:
    app = read(tmp_path, f"{COMPONENTS}[tool.flwr.federations]\n{federations}\n")
    assert app.num_clients == flower_app.DEFAULT_NUM_CLIENTS


MISTAKES = {
    "": r"has no text clientapp in \[tool\.flwr\.app\.components\]",
    "[tool": r"is not TOML",
    "tool = 3": r"tool in .* is a int; expected a table",
    "[tool.flwr]\napp = []": r"app in .* is a list; expected a table",
    "[tool.flwr.app.components]\nclientapp = 3\nserverapp = 'a:b'": r"has no text clientapp",
    "[tool.flwr.app.components]\nclientapp = 'a:b'": r"has no text serverapp",
    COMPONENTS
    + "[tool.flwr.app.config]\nlrs = [1, 2]": r"lrs in .* is a list; expected true, false, a number or a text",
    COMPONENTS + "[tool.flwr.app.config]\nday = 2026-01-01": r"day in .* is a date",
    "project = 3\n" + COMPONENTS: r"project in .* is a int; expected a table",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_in_the_file(text: str, tmp_path: Path) -> None:
    with pytest.raises(FlowerError, match=MISTAKES[text]) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_a_folder_without_an_app(tmp_path: Path) -> None:
    with pytest.raises(FlowerError, match=r"cannot be read: No such file.*; expected the folder of a Flower app"):
        flower_app.read_app(tmp_path)
    (tmp_path / "pyproject.toml").write_bytes(b"\xff")
    with pytest.raises(FlowerError, match=r"cannot be read"):
        flower_app.read_app(tmp_path)


IMPORTS = {
    "import no_such_module": r"ModuleNotFoundError: No module named 'no_such_module'",
    "raise ValueError('bad')": r"raised ValueError: bad \(.*client_app\.py, line 1\)",
    "app = 3": r"is a int; expected a ClientApp",
    "from flwr.serverapp import ServerApp\napp = ServerApp()": r"is a ServerApp; expected a ClientApp",
    "other = 3": r"has no 'app'",
    "app = (": r"SyntaxError",
}


@pytest.mark.parametrize("text", IMPORTS)
def test_components_that_cannot_be_imported(text: str, tmp_path: Path) -> None:
    app = flower.write_app(tmp_path, text)
    with pytest.raises(FlowerError, match=IMPORTS[text]) as caught:
        app.load_client_app()
    assert str(caught.value).startswith(f"clientapp = '{app.clientapp}' of {app.name}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reference", ["", "client_app", "a:", ":app", "no_such_module:app", "a b:app"])
def test_references_that_name_nothing(reference: str, tmp_path: Path) -> None:
    text = f'[tool.flwr.app.components]\nserverapp = "a:app"\nclientapp = "{reference}"\n'
    with pytest.raises(FlowerError, match=r"^clientapp = "):
        read(tmp_path, text).load_client_app()


def test_changes_of_the_run_config(tmp_path: Path) -> None:
    app = read(tmp_path, COMPONENTS + "[tool.flwr.app.config]\nlr = 0.1\nrounds = 3\nfast = true\nname = 'x'\n")
    changed = app.with_run_config(["lr=1", "rounds = 5", "fast=false", "name=sgd", 'name="a b"'])
    assert changed.run_config == {"lr": 1, "rounds": 5, "fast": False, "name": "a b"}
    assert app.run_config["rounds"] == 3


CHANGES = {
    "round=3": r"has no key 'round' in \[tool\.flwr\.app\.config\].*rounds",
    "rounds": r"'rounds': expected KEY=VALUE, such as lr=0\.1",
    "=3": r"expected KEY=VALUE",
    "rounds=[1]": r"expected true, false, a number or a text as the value",
    "rounds=many": r"rounds = 3, of the type int; 'many' is a str",
    "rounds=2.5": r"of the type int; 2\.5 is a float",
    "rounds=true": r"of the type int; true is a bool",
    "rounds=5 lr=0.2": r"of the type int; '5 lr=0\.2' is a str",
}


@pytest.mark.parametrize("change", CHANGES)
def test_wrong_changes_of_the_run_config(change: str, tmp_path: Path) -> None:
    app = read(tmp_path, COMPONENTS + "[tool.flwr.app.config]\nlr = 0.1\nrounds = 3\n")
    with pytest.raises(FlowerError, match=CHANGES[change]):
        app.with_run_config([change])


@pytest.mark.parametrize("version", ["1.41.0", "1.41", "1.42.3", "1.42.0rc1", "1.42.0.dev20260101"])
def test_versions_that_are_tested(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"flwr": version}.__getitem__)
    flower_app.check_version()


@pytest.mark.parametrize("version", ["1.40.9", "1.43.0", "2.0", "0.17", "1"])
def test_other_versions(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = flower.write_app(tmp_path)
    monkeypatch.setattr(importlib.metadata, "version", {"flwr": version}.__getitem__)
    with pytest.raises(FlowerError, match=rf"flwr {version} is installed; expected at least 1\.41 and below 1\.43"):
        app.load_server_app()


def test_no_flwr(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(MissingExtraError, match=r"pip install 'flwr<"):
        flower_app.check_version()


def test_the_example_of_the_repository_is_read() -> None:
    folder = Path(__file__).parents[3] / "examples" / "flower" / "digits"
    assert flower_app.read_app(folder).name
    with pytest.raises(FedplatError):
        flower_app.read_app(folder).with_run_config(["no-such-key=1"])
