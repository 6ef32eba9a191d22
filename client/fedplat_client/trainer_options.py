"""The options of commands that name trainers and evaluators, and what is made of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypedDict

import click

from fedplat.config import user_code
from fedplat.errors import FedplatError
from fedplat_client.client import Client

_KINDS = ("exec", "container", "slurm", "folder")
"""Those of `fedplat_client.trainers.external`, which only clients with one of them load."""
_NAMED = "[NAME=]MODULE:FUNCTION"


class UsageError(click.ClickException):
    """A wrong argument: printed as one line, with click's exit status for usage errors."""

    exit_code = 2


class TrainerOptions(TypedDict):
    """The values of `OPTIONS`."""

    parallel: str | None
    trainers: tuple[str, ...]
    evaluators: tuple[str, ...]
    task_root: Path | None
    stop_grace: float
    pass_env: tuple[str, ...]
    sbatch: tuple[str, ...]
    container_options: tuple[str, ...]


_option = functools.partial(click.option, show_envvar=True)
OPTIONS = (
    click.option(
        "--trainer",
        "trainers",
        multiple=True,
        metavar=_NAMED,
        help="Add a trainer: a function, or what works on a task folder (docs/task-folder.md) outside of this process: "
        "NAME=exec:PROGRAM ARGUMENTS, NAME=container:IMAGE ARGUMENTS, NAME=slurm:PROGRAM ARGUMENTS, or NAME=folder: "
        "for something that this client does not start; repeatable.",
    ),
    click.option(
        "--evaluator",
        "evaluators",
        multiple=True,
        metavar=_NAMED,
        help="Add an evaluator, named like a trainer; repeatable.",
    ),
    click.option(
        "--parallel",
        metavar="none|data|NAME=N,...",
        help="How the processes that torchrun, mpirun or srun started train together, instead of the trainer's own "
        "setting: data, or a layout such as shard=2,tensor=2. For trainers that are a TorchTrainer.",
    ),
    _option(
        "--task-root",
        type=click.Path(path_type=Path, file_okay=False),
        envvar="FEDPLAT_TASK_ROOT",
        help="Folder of this client for task folders, such as one on a cluster's shared file system; default: in the "
        "data directory.",
    ),
    _option(
        "--stop-grace",
        type=click.FloatRange(min=0.0),
        default=10.0,
        envvar="FEDPLAT_STOP_GRACE",
        metavar="SECONDS",
        show_default=True,
        help="How long a program may take to end after SIGTERM. It gets SIGTERM half of that after its task folder has "
        "the file stop.",
    ),
    click.option(
        "--pass-env",
        "pass_env",
        multiple=True,
        metavar="NAME",
        help="Pass a variable of the environment to programs, which get only PATH, HOME and the like; repeatable.",
    ),
    click.option(
        "--sbatch",
        multiple=True,
        metavar="OPTION",
        help="Add an option of sbatch for slurm:, such as --sbatch=--time=30 or --sbatch=--gres=gpu:1; repeatable.",
    ),
    click.option(
        "--container-option",
        "container_options",
        multiple=True,
        metavar="OPTION",
        help="Add an option of docker run or podman run for container:, such as --container-option=--memory=8g or "
        "--container-option=--volume=/data:/data:ro; repeatable.",
    ),
)
"""The options of each command that runs trainers by name."""


def add_trainers(client: Client, options: TrainerOptions) -> None:
    """Add the trainers and evaluators to a client. Raises `UsageError`, and `ValueError` for a name that is taken."""
    if not (options["trainers"] or options["evaluators"]):
        raise UsageError("there is nothing to do; give at least one --trainer or --evaluator")
    make_external = functools.cache(lambda: _External(client, options))
    with _replace_parallel(options["parallel"]):
        trainers = [(spec, *_load("--trainer", spec, make_external)) for spec in options["trainers"]]
        evaluators = [_load("--evaluator", spec, make_external) for spec in options["evaluators"]]
    for spec, name, function in trainers:
        if options["parallel"] is not None and not hasattr(function, "parallel"):
            raise UsageError(
                f"--parallel is for trainers that are a TorchTrainer; --trainer {spec!r} is a "
                f"{type(function).__name__}; remove --parallel"
            )
        client.add_trainer(name, function)
    for name, function in evaluators:
        # A trainer object such as TorchTrainer has its evaluator as a method.
        client.add_evaluator(name, getattr(function, "evaluate", function))


class _External:
    """What the external trainers of a client have in common."""

    def __init__(self, client: Client, options: TrainerOptions) -> None:
        from fedplat_client.trainers.external import ExternalOptions, TaskRoot

        self._options = options
        task_root = options["task_root"]
        self._root = TaskRoot(client.tasks if task_root is None else task_root.absolute())
        self._launch = ExternalOptions(
            pass_env=options["pass_env"], sbatch=options["sbatch"], container=options["container_options"]
        )
        client.add_context(self._root)

    def make(self, kind: str, rest: str) -> Any:
        """Return the trainer of a kind. Raises `ValueError`."""
        from fedplat_client.trainers.external import ExternalTrainer, make_launcher

        launcher = make_launcher(kind, rest, self._launch)
        return ExternalTrainer(launcher=launcher, root=self._root, stop_grace_s=self._options["stop_grace"])


def _load(option: str, spec: str, make_external: Callable[[], _External]) -> tuple[str, Any]:
    """Return the name and the function of `[name=]module:function`, or of `name=kind:command`."""
    name, equals, target = spec.partition("=")
    kind, colon, rest = target.partition(":")
    if equals and colon and kind in _KINDS:
        try:
            return name, make_external().make(kind, rest)
        except ValueError as exc:
            raise UsageError(f"{option} {spec!r}: {exc}") from exc
    if spec.partition(":")[0] in _KINDS:
        raise UsageError(f"{option} {spec!r} has no name; expected NAME={spec}, with the name of the jobs' trainer")
    name, _, target = spec.rpartition("=")
    try:
        return name or user_code.split(target)[1], user_code.load_function(target)
    except FedplatError as exc:
        raise UsageError(f"{option} {spec!r}: {exc}") from exc


def _replace_parallel(text: str | None) -> AbstractContextManager[None]:
    """Create trainers within the block with the given setting, instead of their own one."""
    if text is None:
        return nullcontext()
    from fedplat.parallel import Parallel
    from fedplat_client.trainers.torch import replace_parallel

    if text == "none" or text == "data":
        return replace_parallel(text)
    try:
        return replace_parallel(Parallel.from_text(text))
    except ValueError as exc:
        raise UsageError(f"--parallel {exc}; or use none or data") from exc
