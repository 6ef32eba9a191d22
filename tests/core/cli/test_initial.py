from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedplat import initial, wire
from fedplat.admin.submission import model_chunks
from fedplat.errors import JobFileError
from fedplat.model import Parameters

MODULE = """
import numpy as np
import torch
from fedplat.model import Parameters

class Factory:
    @staticmethod
    def build():
        return {"w": np.ones(2, np.float32)}

def parameters(): return Parameters.from_arrays({"w": np.ones(2, np.float32)})
def arrays(): return {"w": np.ones(2, np.float32)}
def state_dict(): return {"w": torch.ones(2)}
def module():
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.ones(2))
    return module
def mixed(): return {"w": torch.ones(2, dtype=torch.bfloat16), "n": np.array(3)}
def lazy():
    from sibling import W
    return {"w": W}

number = 3
def nothing(): return None
def listing(): return [1, 2]
def no_name(): return {1: np.ones(2)}
def no_tensor(): return {"w": [1.0]}
def empty(): return {}
def infinite(): return {"w": np.array([1.0, np.inf], np.float32)}
def words(): return {"w": np.array(["a"])}
def sparse(): return {"w": torch.eye(2).to_sparse()}
def eight(): return {"w": torch.ones(2).to(torch.float8_e4m3fn)}
def meta(): return {"w": torch.ones(2, device="meta")}
def fails():
    return 1 / 0
def leaves(): raise SystemExit("bye")
def greedy(size): return size
"""
EXPECTED = Parameters.from_arrays({"w": np.ones(2, np.float32)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "jobmodel.py").write_text(MODULE)
    (tmp_path / "sibling.py").write_text("import numpy as np\nW = np.ones(2, np.float32)\n")
    (tmp_path / "broken.py").write_text("x = 1\ny = = 2\n")
    (tmp_path / "raises.py").write_text("x = 1\nraise RuntimeError('at import')\n")
    (tmp_path / "needs.py").write_text("import a_package_that_nobody_has\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "inner.py").write_text(
        "import numpy as np\ndef build():\n    return {'w': np.ones(2, np.float32)}\n"
    )
    (tmp_path / "with-hyphen.py").write_text((tmp_path / "pack" / "inner.py").read_text())
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "model.safetensors").write_bytes(EXPECTED.to_bytes())
    (tmp_path / "bad.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "short.safetensors").write_bytes(b"x")
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "sub/model.safetensors",
        "jobmodel:parameters",
        "jobmodel:arrays",
        "jobmodel:state_dict",
        "jobmodel:module",
        "jobmodel:lazy",
        "jobmodel:Factory.build",
        "pack.inner:build",
        "pack/inner.py:build",
        "jobmodel.py:Factory.build",
        "jobmodel.py:lazy",
        "with-hyphen:build",
    ],
)
def test_each_kind_of_initial_model(name: str, folder: Path):
    before = list(sys.path)
    assert initial.resolve(name, folder) == EXPECTED
    assert sys.path == before


def test_arrays_and_tensors_may_be_mixed(folder: Path):
    parameters = initial.resolve("jobmodel:mixed", folder)
    assert parameters["w"].dtype.name == "bfloat16"
    assert parameters["n"] == 3


def test_an_absolute_path_needs_no_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert initial.resolve(str(folder / "sub" / "model.safetensors"), elsewhere) == EXPECTED


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.safetensors", r"none.safetensors cannot be read: No such file or directory"),
        ("pack.safetensors", r"cannot be read"),
        ("bad.safetensors", r"the header claims"),
        ("short.safetensors", r"too short"),
        ("nomodule:build", r"there is no module 'nomodule' in .* and none is installed"),
        ("pack.none:build", r"there is no module 'pack.none'"),
        ("jobmodel.none:build", r"there is no module 'jobmodel.none'"),
        ("none.py:build", r"there is no file /.*/none.py"),
        ("broken.py:build", r"import broken.py raised SyntaxError: .*broken.py, line 2\)$"),
        ("jobmodel", r"'jobmodel' cannot be read; expected module:name or /path/to/file.py:name"),
        ("jobmodel:", r"'jobmodel:' cannot be read"),
        ("jobmodel:none", r"the module 'jobmodel' \(.*jobmodel.py\) has no 'none'"),
        ("jobmodel:Factory.none", r"the module 'jobmodel' \(.*jobmodel.py\) has no 'Factory.none'"),
        ("jobmodel:number", r"'number' is a int; expected a function"),
        ("jobmodel:nothing", r"nothing\(\) returned a NoneType; expected Parameters, a mapping of NumPy arrays"),
        ("jobmodel:listing", r"listing\(\) returned a list; expected Parameters"),
        ("jobmodel:no_name", r"no_name\(\) returned the key 1; expected a tensor's name"),
        ("jobmodel:no_tensor", r"returned a list for 'w'; expected a NumPy array or a torch tensor"),
        ("jobmodel:empty", r"the model has no tensors"),
        ("jobmodel:infinite", r"NaN or infinite"),
        ("jobmodel:words", r"tensor 'w' has dtype <U1; expected one of"),
        ("jobmodel:sparse", r"'w'"),
        ("jobmodel:eight", r"'w'"),
        ("jobmodel:meta", r"'w'"),
        ("jobmodel:fails", r"fails\(\) raised ZeroDivisionError: division by zero \(.*jobmodel.py, line \d+\)$"),
        ("jobmodel:leaves", r"leaves\(\) raised SystemExit: bye \(.*jobmodel.py, line \d+\)$"),
        ("jobmodel:greedy", r"greedy\(\) raised TypeError: .*'size'$"),
        ("broken:build", r"import broken raised SyntaxError: .*broken.py, line 2\)$"),
        ("raises:build", r"import raises raised RuntimeError: at import \(.*raises.py, line 2\)$"),
        ("needs:build", r"import needs raised ModuleNotFoundError: .*'a_package_that_nobody_has' \(.*, line 1\)$"),
    ],
)
def test_each_mistake_is_one_line_that_names_it(name: str, message: str, folder: Path):
    before = list(sys.path)
    (folder / "pack.safetensors").mkdir()
    with pytest.raises(JobFileError, match=message) as caught:
        initial.resolve(name, folder)
    assert str(caught.value).startswith(f"model.initial = {name!r}: ")
    assert "\n" not in str(caught.value)
    assert sys.path == before


def test_two_folders_may_use_the_same_module_name(tmp_path: Path):
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "samename.py").write_text(
            f"import numpy as np\ndef build():\n    return {{'w': np.array([{number}.0])}}\n"
        )
    values = [initial.resolve("samename:build", tmp_path / str(number))["w"][0] for number in (1, 2, 1)]
    assert values == [1.0, 2.0, 1.0]


def test_a_module_named_like_an_imported_one_does_not_replace_it(tmp_path: Path):
    import colorsys

    (tmp_path / "colorsys.py").write_text("import numpy as np\ndef build():\n    return {'w': np.ones(1)}\n")
    assert initial.resolve("colorsys:build", tmp_path)["w"][0] == 1.0
    assert sys.modules["colorsys"] is colorsys


def test_torch_is_not_imported_for_a_model_of_arrays(tmp_path: Path):
    (tmp_path / "plain.py").write_text("import numpy as np\ndef build():\n    return {'w': np.ones(1)}\n")
    code = (
        "import sys, pathlib; from fedplat import admin, initial; from fedplat.cli import job_files; "
        f"initial.resolve('plain:build', pathlib.Path({str(tmp_path)!r})); "
        "print(sorted({'torch', 'typer', 'rich', 'sqlalchemy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_chunks_are_the_file():
    parameters = Parameters.from_arrays({"w": np.arange(wire.UPLOAD_CHUNK_BYTES, dtype=np.uint16), "z": np.zeros(0)})
    seen: list[tuple[int, int]] = []
    found = list(model_chunks(parameters, lambda done, total: seen.append((done, total))))
    assert b"".join(found) == parameters.to_bytes()
    assert max(map(len, found)) == wire.UPLOAD_CHUNK_BYTES
    assert seen[-1] == (len(parameters.to_bytes()), len(parameters.to_bytes()))
