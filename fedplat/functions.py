"""Code of the user's own that a file names: `module:function`, found in the file's folder or among what is installed.

A job file names the function that makes its first model, a simulation file those that make its data and its model. It
runs on the machine of whoever wrote the file, never on a server.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from fedplat.errors import FedplatError, JobFileError


def call(name: str, folder: Path, arguments: Mapping[str, object] | None = None) -> object:
    """What `module:function` returns for keyword `arguments`, with `folder` first on `sys.path` for that time.

    Raises `JobFileError` where it is not found, and for whatever it raises, which is named with its line.
    """
    module_name, _, function_name = name.partition(":")
    with importable(folder, module_name), blamed(f"{function_name}()"):
        return find(name, folder)(**(arguments or {}))


def find(name: str, folder: Path) -> Callable[..., object]:
    """The function that `module:function` names; within `importable`. Raises `JobFileError`."""
    module_name, _, function_name = name.partition(":")
    with blamed(f"import {module_name}"):
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as exc:
            # A module that the job's module imports in turn is another matter: `blamed` tells it.
            if exc.name is None or not f"{module_name}.".startswith(f"{exc.name}."):
                raise
            raise JobFileError(f"there is no module {exc.name!r} in {folder} and none that is installed") from exc
    origin = getattr(found, "__file__", None) or "a folder"
    for part in function_name.split("."):
        if not hasattr(found, part):
            raise JobFileError(f"the module {module_name!r} ({origin}) has no {function_name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise JobFileError(f"{function_name!r} is a {type(found).__name__}; expected a function")
    return found


@contextlib.contextmanager
def importable(folder: Path, module_name: str) -> Generator[None]:
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
def blamed(what: str) -> Generator[None]:
    """Turns whatever the job's own code raises into a `JobFileError` that names the line."""
    try:
        yield
    except FedplatError:
        raise
    except (Exception, SystemExit) as exc:  # foreign code may raise anything, and the operator needs one line
        frames = traceback.extract_tb(exc.__traceback__)
        # Neither this file nor Python's import machinery is where the mistake is.
        places = [f"{f.filename}, line {f.lineno}" for f in frames if f.filename != __file__ and f.filename[:1] != "<"]
        if isinstance(exc, SyntaxError) and exc.filename:
            places.append(f"{exc.filename}, line {exc.lineno}")
        where = f" ({places[-1]})" if places else ""
        raise JobFileError(f"{what} raised {type(exc).__name__}: {exc}{where}") from exc
