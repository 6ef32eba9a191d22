"""The model that a job starts from: `[model] initial` of a job file, resolved where the job is submitted.

It is a `.safetensors` file or `module:function`, both relative to the job file. The function may return
`Parameters`, a mapping of NumPy arrays, a torch `state_dict` or an `nn.Module`; torch is imported here only when
the function's own code has imported it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np

from fedplat import wire
from fedplat.errors import JobFileError, ModelError
from fedplat.model import Parameters


def resolve(initial: str, folder: Path) -> Parameters:
    """The parameters that `initial` names, relative to `folder`.

    Raises `JobFileError` when there are none, when they are not finite, or when the function fails. Runs the code of
    the job's author, with `folder` first on `sys.path` for that time.
    """
    try:
        if initial.endswith(".safetensors"):
            parameters = _from_file(folder / initial)
        else:
            parameters = _from_function(initial, folder)
        if not parameters:
            raise JobFileError("the model has no tensors; expected at least one")
        if not parameters.is_finite():
            raise JobFileError("the model holds NaN or infinite values; expected finite ones")
    except (JobFileError, ModelError) as exc:
        raise JobFileError(f"model.initial = {initial!r}: {exc}") from exc
    return parameters


def chunks(parameters: Parameters, progress: Callable[[int, int], object] | None = None) -> Iterator[bytes]:
    """The safetensors file in pieces for the wire; `progress` is told the bytes taken and the bytes in all."""
    done, total = 0, parameters.schema.file_size_bytes
    for part in (memoryview(parameters.schema.header), parameters.buffer.data):
        for start in range(0, len(part), wire.UPLOAD_CHUNK_BYTES):
            chunk = bytes(part[start : start + wire.UPLOAD_CHUNK_BYTES])
            yield chunk
            done += len(chunk)
            if progress is not None:
                progress(done, total)


def _from_file(path: Path) -> Parameters:
    try:
        return Parameters.open(path)
    except OSError as exc:
        raise JobFileError(f"{path} cannot be read: {exc.strerror or exc}") from exc


def _from_function(initial: str, folder: Path) -> Parameters:
    module_name, _, function_name = initial.partition(":")
    with _importable(folder, module_name):
        function = _find(module_name, function_name, folder)
        with _blamed(f"{function_name}()"):
            value: object = function()
        return _converted(value, function_name)


def _find(module_name: str, function_name: str, folder: Path) -> Callable[[], object]:
    with _blamed(f"import {module_name}"):
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as exc:
            # A module that the job's module imports in turn is another matter: `_blamed` tells it.
            if exc.name is None or not f"{module_name}.".startswith(f"{exc.name}."):
                raise
            raise JobFileError(f"there is no module {exc.name!r} in {folder} and none that is installed") from exc
    origin = getattr(found, "__file__", None) or "a folder"
    for name in function_name.split("."):
        if not hasattr(found, name):
            raise JobFileError(f"the module {module_name!r} ({origin}) has no {function_name!r}")
        found = getattr(found, name)
    if not callable(found):
        raise JobFileError(f"{function_name!r} is a {type(found).__name__}; expected a function")
    return found


def _converted(value: object, function_name: str) -> Parameters:
    if isinstance(value, Parameters):
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.nn.Module):
        value = cast(Any, value).state_dict()
    if not isinstance(value, Mapping):
        raise JobFileError(
            f"{function_name}() returned a {type(value).__name__}; "
            "expected Parameters, a mapping of NumPy arrays, a state_dict or an nn.Module"
        )
    tensors = cast(Mapping[Any, Any], value)
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise JobFileError(f"{function_name}() returned the key {name!r}; expected a tensor's name")
        if not isinstance(tensor, np.ndarray) and not (torch is not None and isinstance(tensor, torch.Tensor)):
            raise JobFileError(
                f"{function_name}() returned a {type(cast(object, tensor)).__name__} for {name!r}; "
                "expected a NumPy array or a torch tensor"
            )
    return Parameters.from_arrays({name: _array(name, tensor) for name, tensor in tensors.items()})


def _array(name: str, tensor: Any) -> np.ndarray[Any, Any]:
    if isinstance(tensor, np.ndarray):
        return tensor
    from fedplat.backends import torch as backend

    try:
        return backend.from_state_dict({name: tensor})[name]
    except (RuntimeError, TypeError) as exc:  # a sparse or meta tensor, a dtype that NumPy does not have
        raise JobFileError(f"tensor {name!r} ({tensor.dtype}) cannot be stored: {exc}") from exc


@contextlib.contextmanager
def _importable(folder: Path, module_name: str) -> Generator[None]:
    """Within it, modules are looked for in `folder` first, whatever was imported by that name from elsewhere."""
    top = module_name.partition(".")[0]
    folder = folder.resolve()
    hidden: dict[str, ModuleType] = {}
    is_here = (folder / f"{top}.py").is_file() or (folder / top).is_dir()
    loaded = sys.modules.get(top)
    if is_here and loaded is not None and not _lies_in(loaded, folder):
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == top}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the job's code may have taken it away
            sys.path.remove(str(folder))
        sys.modules.update(hidden)


def _lies_in(module: ModuleType, folder: Path) -> bool:
    places = [module.__file__] if module.__file__ else list(getattr(module, "__path__", ()))
    return any(Path(place).resolve().is_relative_to(folder) for place in places)


@contextlib.contextmanager
def _blamed(what: str) -> Generator[None]:
    """Turns whatever the job's own code raises into a `JobFileError` that names the line."""
    try:
        yield
    except JobFileError:
        raise
    except (Exception, SystemExit) as exc:  # foreign code may raise anything, and the operator needs one line
        frames = traceback.extract_tb(exc.__traceback__)
        # Neither this file nor Python's import machinery is where the mistake is.
        places = [f"{f.filename}, line {f.lineno}" for f in frames if f.filename != __file__ and f.filename[:1] != "<"]
        if isinstance(exc, SyntaxError) and exc.filename:
            places.append(f"{exc.filename}, line {exc.lineno}")
        where = f" ({places[-1]})" if places else ""
        raise JobFileError(f"{what} raised {type(exc).__name__}: {exc}{where}") from exc
