"""User code: found without running it, and loaded."""

from __future__ import annotations

import pickle
import signal
import sys
from pathlib import Path

import pytest

from fedplat import texts
from fedplat.config import user_code
from fedplat.errors import UserCodeError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("", "cannot be read"),
        ("rubbish", "cannot be read"),
        ("module:", "cannot be read"),
        (":function", "cannot be read"),
        ("module:not a name", "cannot be read"),
        ("no_such_module_anywhere:score", "there is no module"),
        ("json.no_such_part.deep:score", None),
        ("..:score", "cannot be read"),
        ("nothing.py:score", "there is no file"),
        ("here.py:scor", "has no 'scor'"),
        ("here:scor", "has no 'scor'"),
        ("package.inner:scor", "has no 'scor'"),
        ("broken.py:score", "cannot be read"),
    ],
)
def test_mistakes_are_found_without_running_anything(reference: str, said: str | None) -> None:
    write("here.py", "raise SystemExit\ndef score(parameters): ...\n")
    write("package/__init__.py", "raise SystemExit\n")
    write("package/inner.py", "def score(parameters): ...\n")
    write("broken.py", "def score(:\n")
    if said is None:
        user_code.check(reference)  # only importing it would tell
    else:
        with pytest.raises(UserCodeError, match=said):
            user_code.check(reference)


@pytest.mark.parametrize(
    "text",
    [
        "def score(parameters): ...",
        "class score: ...",
        "score = print",
        "from json import loads as score",
        "from json import *",
        "if True:\n    def score(parameters): ...",
    ],
)
def test_functions_are_found_however_they_are_bound(text: str) -> None:
    write("here.py", text)
    write("folder/inner.py", text)
    for reference in ("here.py:score", "here:score", "folder.inner:score"):
        user_code.check(reference)


def test_modules_that_are_not_python_files_are_left_to_the_import() -> None:
    user_code.check("math:sqrt")
    assert user_code.load("math:sqrt") is __import__("math").sqrt


def test_two_files_of_the_same_name_are_two_evaluators() -> None:
    one = write("one/evaluate.py", "def score(parameters): return {'one': 1.0}")
    two = write("two/evaluate.py", "def score(parameters): return {'two': 2.0}")
    stdlib = write("json.py", "def score(parameters): return {'mine': 3.0}")
    results = [user_code.load(f"{path}:score")(None) for path in (one, two, stdlib, one)]
    assert results == [{"one": 1.0}, {"two": 2.0}, {"mine": 3.0}, {"one": 1.0}]


def test_a_file_may_import_its_neighbours() -> None:
    write("folder/neighbour_of_evaluator.py", "WORTH = 4.0")
    path = write("folder/evaluate.py", "import neighbour_of_evaluator as n\ndef score(p): return {'x': n.WORTH}")
    assert user_code.load(f"{path}:score")(None) == {"x": 4.0}


def test_a_file_that_fails_is_tried_afresh() -> None:
    path = write("evaluate.py", "raise RuntimeError('not today')")
    with pytest.raises(UserCodeError, match=r"raised RuntimeError: not today \(/.*/evaluate.py, line 1\)"):
        user_code.load(f"{path}:score")
    path.write_text("def score(p): return {}\n# longer, so that no cached code is taken")
    assert user_code.load(f"{path}:score")(None) == {}
    for reference, said in ((f"{path}:other", "has no 'other'"), ("nothing.py:score", "there is no file")):
        with pytest.raises(UserCodeError, match=said):
            user_code.load(reference)
    with pytest.raises(UserCodeError, match="there is no module 'no_such_module_anywhere' in"):
        user_code.load("no_such_module_anywhere:score")


def test_an_error_in_a_library_names_the_line_that_called_it(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "shapes.py").write_text("def check(value):\n    return value.shape\n")
    (tmp_path / "loss.py").write_text("def compute(check):\n    check(1)\n")
    check = user_code.load(f"{tmp_path / 'site-packages' / 'shapes.py'}:check", tmp_path)
    compute = user_code.load(f"{tmp_path / 'loss.py'}:compute", tmp_path)
    expected = r"the loss raised AttributeError: .* \(/.*/loss.py, line 2\)$"
    with pytest.raises(UserCodeError, match=expected), user_code.wrap_errors("the loss"):
        compute(check)


def test_a_line_of_fedplat_is_no_place_of_a_mistake() -> None:
    arguments = {"s": "{}", "object_hook": texts.size}  # json calls it
    with pytest.raises(UserCodeError, match=r"^loads\(\) raised TypeError: .* \(/.*/json/decoder.py, line \d+\)$"):
        user_code.call("json:loads", Path(), arguments)


def test_a_file_whose_name_is_not_utf_8_is_loaded() -> None:
    write("M\udcfcn.py", "def score(parameters): return 7\n")
    assert user_code.load_function("M\udcfcn.py:score")(None) == 7


def test_another_process_finds_the_file_of_a_pickled_function() -> None:
    for name in ("trainer.py", "my-trainer.v2.py"):
        content = pickle.dumps(user_code.load_function(f"{write(name, 'def square(x): return x * x')}:square"))
        for loaded in [each for each in sys.modules if each.startswith(("trainer_", "my-trainer"))]:
            del sys.modules[loaded]  # a worker of multiprocessing that is not forked has none of them
        assert pickle.loads(content)(3) == 9
    with pytest.raises(ModuleNotFoundError):
        __import__("trainer_0123456789abcdef")


def test_whatever_user_code_raises_is_an_error_of_it_except_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unusual(BaseException):
        pass

    for exc in (Unusual("mine"), SystemExit(3), MemoryError("none left")):
        with (
            pytest.raises(UserCodeError, match=f"the loss raised {type(exc).__name__}: "),
            user_code.wrap_errors("the loss"),
        ):
            raise exc
    for installed, expected in ((signal.default_int_handler, KeyboardInterrupt), (signal.SIG_IGN, UserCodeError)):

        def getsignal(_: int, installed: object = installed) -> object:
            return installed

        monkeypatch.setattr(signal, "getsignal", getsignal)
        with pytest.raises(expected), user_code.wrap_errors("the loss"):
            raise KeyboardInterrupt
