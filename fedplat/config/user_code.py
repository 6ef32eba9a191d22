"""User code: the functions and objects that a file or an option names.

A reference is `module:name` or `path/to/file.py:name`, where `name` may have dots. Modules and relative paths are
searched in a given folder first, then among the installed packages. The code runs on the machine of its owner (a job's
author, a researcher, an operator, the owner of a client), never on a server because a job or a client names it.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import operator
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from hashlib import sha256
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Annotated, Any

from msgspec import Meta

from fedplat import texts
from fedplat.errors import FedplatError, UserCodeError

Reference = Annotated[str, Meta(pattern=r"^[^:\s][^:]*:[\w.]+$")]
_EXPECTED = "expected module:name or /path/to/file.py:name"
_FILE_MODULE = re.compile(r".+_[0-9a-f]{16}")


def call(reference: str, folder: Path, arguments: Mapping[str, object] | None = None) -> object:
    """Call a function with keyword `arguments`; `folder` is first on `sys.path` meanwhile.

    Raises `UserCodeError` if the function is not found or raises an exception; the message names the line.
    """
    name = split(reference)[1]
    with importable(reference, folder), wrap_errors(f"{name}()"):
        return load_function(reference, folder)(**(arguments or {}))


def load_function(reference: str, folder: Path = Path()) -> Callable[..., Any]:
    """Return the function that `reference` names, as `load` does. Raises `UserCodeError`."""
    function = load(reference, folder)
    if not callable(function):
        raise UserCodeError(f"{split(reference)[1]!r} is a {type(function).__name__}; expected a function")
    return function


def load(reference: str, folder: Path = Path()) -> Any:
    """Import the object that `reference` names.

    `folder`, or the folder of the file, stays on `sys.path`, except within `importable`. Raises `UserCodeError` if the
    object is not found or its module raises an exception.
    """
    module_name, name = split(reference)
    folder, file = _locate(module_name, folder)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    with wrap_errors(f"import {module_name}"):
        module = _import(module_name, folder) if file is None else _load_file(file)
    try:
        return operator.attrgetter(name)(module)
    except AttributeError as exc:
        origin = getattr(module, "__file__", None) or "a folder"
        raise UserCodeError(f"the module {module_name!r} ({origin}) has no {name!r}") from exc


def find_reference(record: type) -> str | None:
    """Return the reference to a class of a file that `load` has imported; None if an import statement finds it."""
    file = getattr(sys.modules.get(record.__module__), "__file__", None)
    return f"{file}:{record.__qualname__}" if file and record.__module__ == _module_name(Path(file)) else None


def check(reference: str) -> None:
    """Raise `UserCodeError` if `reference` does not exist; reads only the source text and runs no code."""
    module_name, name = split(reference)
    file = _find_source(module_name)
    if file is None:
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError) as exc:
        raise UserCodeError(f"{reference!r} cannot be read: {exc}") from exc
    names = set(_bound_names(tree))
    if name.partition(".")[0] not in names and "*" not in names:
        raise UserCodeError(f"{file} has no {name!r}")


def make_absolute(reference: str) -> str:
    """Return the reference with an absolute path; a reference to a module is returned unchanged."""
    module_name, name = split(reference)
    return f"{Path(module_name).resolve()}:{name}" if module_name.endswith(".py") else reference


def split(reference: str) -> tuple[str, str]:
    """Return the module, or the path of a file, and the name in it. Raises `UserCodeError`."""
    module_name, _, name = reference.rpartition(":")
    is_module = all(module_name.split("."))  # hyphens are allowed: only `import` statements refuse them
    if not (is_module or module_name.endswith(".py")) or not all(part.isidentifier() for part in name.split(".")):
        raise UserCodeError(f"{reference!r} cannot be read; {_EXPECTED}")
    return module_name, name


@contextlib.contextmanager
def importable(reference: str, folder: Path) -> Generator[None]:
    """Make the module of `reference` importable from `folder`, even if another module of that name was imported before.

    Restores `sys.path` and the other module at the end.
    """
    module_name = split(reference)[0]
    folder, file = _locate(module_name, folder)
    top = module_name.partition(".")[0]
    hidden: dict[str, ModuleType] = {}
    in_folder = file is None and ((folder / f"{top}.py").is_file() or (folder / top).is_dir())
    loaded = sys.modules.get(top)
    if in_folder and loaded is not None and not _is_within(loaded, folder):
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == top}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # user code may have removed it
            sys.path.remove(str(folder))
        sys.modules.update(hidden)


def is_interrupt(exc: BaseException) -> bool:
    """Return whether an exception is Ctrl-C, rather than something that user code raises by itself."""
    is_main = threading.current_thread() is threading.main_thread()
    return (
        isinstance(exc, KeyboardInterrupt) and is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


@contextlib.contextmanager
def wrap_errors(action: str) -> Generator[None]:
    """Turn any exception of user code into a `UserCodeError` that names the line."""
    try:
        yield
    except FedplatError:
        raise
    except BaseException as exc:  # user code may raise anything; the operator needs one line
        if is_interrupt(exc) or isinstance(exc, GeneratorExit):
            raise
        raise make_error(action, exc) from exc


def make_error(action: str, exc: BaseException) -> UserCodeError:
    """Return the error of an exception that user code has raised, with the file and the line."""
    places = _list_places(exc)
    if isinstance(exc, SyntaxError) and exc.filename:
        places.append(f"{exc.filename}, line {exc.lineno}")
    where = f" ({places[-1]})" if places else ""
    return UserCodeError(f"{action} raised {texts.describe(exc)}{where}")


def _list_places(exc: BaseException) -> list[str]:
    """Return the files and lines of an error's traceback, those of the user's code if it has any.

    The mistake is neither in Python's import machinery nor in fedplat, which called the code, and hardly in an
    installed library.
    """
    steps = [(frame, line) for frame, line in traceback.walk_tb(exc.__traceback__)]
    steps = [step for step in steps if step[0].f_code.co_filename[:1] != "<"]
    steps = [step for step in steps if not _is_of_fedplat(step[0])] or steps
    files = [(frame.f_code.co_filename, line) for frame, line in steps]
    files = [each for each in files if each[0] != __file__]
    files = [each for each in files if "site-packages" not in each[0]] or files
    return [f"{file}, line {line}" for file, line in files]


def _is_of_fedplat(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("fedplat", "fedplat_client", "fedplat_server")


def _locate(module_name: str, folder: Path) -> tuple[Path, Path | None]:
    """Return the folder to search first, and the file if the reference names one."""
    if not module_name.endswith(".py"):
        return folder.resolve(), None
    file = (folder / module_name).resolve()
    return file.parent, file


def _import(module_name: str, folder: Path) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        # If a module that the user's module imports is missing, `wrap_errors` reports it.
        if exc.name is None or not f"{module_name}.".startswith(f"{exc.name}."):
            raise
        raise UserCodeError(f"there is no module {exc.name!r} in {folder}, and none is installed") from exc


def _load_file(file: Path) -> ModuleType:
    name = _module_name(file)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise UserCodeError(f"there is no file {file}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module_name(file: Path) -> str:
    """Return a unique name: two files may have the same name, or the name of a module that is already imported."""
    return f"{file.stem.replace('.', '_')}_{sha256(os.fsencode(file)).hexdigest()[:16]}"


class _FileFinder:
    """Finds the files that `load` has imported in another process, which gets their names with pickled functions.

    The workers of `multiprocessing` that are not forked have the `sys.path` of their parent, on which `load` has left
    the file's folder, and import the program of their parent, and so this module, before anything else.
    """

    @staticmethod
    def find_spec(
        name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if _FILE_MODULE.fullmatch(name):
            for folder in map(Path, sys.path):
                for file in folder.glob("*.py"):
                    if _module_name(file) == name:
                        return importlib.util.spec_from_file_location(name, file)
        return None


sys.meta_path.append(_FileFinder)


def _is_within(module: ModuleType, folder: Path) -> bool:
    places = [module.__file__] if module.__file__ else list(getattr(module, "__path__", ()))
    return any(Path(place).resolve().is_relative_to(folder) for place in places)


def _find_source(module_name: str) -> Path | None:
    """Return the file of a module without importing it or its packages; None if only an import can find it."""
    if module_name.endswith(".py"):
        file = Path(module_name).resolve()
        if not file.is_file():
            raise UserCodeError(f"there is no file {file}")
        return file
    parts = module_name.split(".")
    for folder in (Path.cwd(), *map(Path, sys.path)):
        for file in (folder.joinpath(*parts, "__init__.py"), folder.joinpath(*parts[:-1], f"{parts[-1]}.py")):
            if file.is_file():
                return file
    if importlib.util.find_spec(parts[0]) is None:
        raise UserCodeError(f"there is no module {module_name!r} in {Path.cwd()} or on the import path; {_EXPECTED}")
    return None  # a zip file, or compiled code


def _bound_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module binds anywhere, since a function may be defined under a condition."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
