"""`fedplat model export`: a job's tensors in a file, or a folder that transformers and peft read."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedplat.cli import formats, job_lists, options
from fedplat.cli import session as sessions
from fedplat.cli.output import Output, to_record
from fedplat.errors import DataError, MissingExtraError
from fedplat.extras import install_command
from fedplat.model import Parameters
from fedplat.simulation.recording import folder as folders

if TYPE_CHECKING:
    from fedplat.pytorch.huggingface import export


class ExportFormat(enum.StrEnum):
    """What an export writes: the job's tensors in a file, or a folder that transformers reads."""

    SAFETENSORS = "safetensors"
    PEFT = "peft"
    MERGED = "merged"


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A model to export: its file, the base that it belongs to, and what it is called."""

    path: Path
    base_sha256: str
    name: str


@dataclasses.dataclass(frozen=True)
class _Source:
    """What makes the module that the clients have trained: their function, or a base and a configuration."""

    function: str
    base: Path | None
    adapter: Path | None

    def check(self, form: ExportFormat) -> None:
        """Raise `typer.BadParameter` unless exactly one of them is given."""
        if form is ExportFormat.SAFETENSORS:
            if self != _Source("", None, None):
                raise typer.BadParameter("--model, --base and --adapter: expected --format peft or merged with them")
        elif bool(self.function) == (self.adapter is not None):
            raise typer.BadParameter(
                f"--format {form}: expected either --model FILE:FUNCTION, which makes the model that the clients "
                "train, or --adapter FILE with --base DIR"
            )
        elif self.adapter is not None and self.base is None:
            raise typer.BadParameter("--adapter FILE: expected --base DIR, the folder of the base, with it")

    def make_function(self) -> Callable[[], Any]:
        """Return the function that makes the module."""
        from fedplat.pytorch.huggingface import export
        from fedplat.simulation.scenario.model import OwnModule

        if self.adapter is not None and self.base is not None:
            return export.FromFiles(self.base, self.adapter)
        return OwnModule(self.function, Path())


def export_model(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB",
            help="Id of the job, or its name if it is unique; with --format peft or merged also the run folder of a "
            "simulation (with a '/', such as runs/chat) or a .safetensors file.",
            autocompletion=sessions.complete_jobs,
        ),
    ],
    output: Annotated[
        Path, typer.Option("--to", metavar="PATH", help="File to write (safetensors), or folder (peft, merged).")
    ],
    version: Annotated[
        int | None,
        typer.Option(
            "--model-version",
            min=0,
            max=2**32 - 1,
            metavar="N",
            help="Version, 0 for the initial model. Default: the latest.",
        ),
    ] = None,
    form: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="safetensors: the job's tensors. Of a model of transformers also peft: its adapters, with the "
            "name of their base; merged: the whole model, with the adapters added to its weights.",
        ),
    ] = ExportFormat.SAFETENSORS,
    model: Annotated[
        str,
        typer.Option(
            metavar="FILE:FUNCTION", help="Function that makes the model of the clients, such as chat.py:make_model."
        ),
    ] = "",
    base: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the base. Default: the one that FUNCTION has loaded."),
    ] = None,
    adapter: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Configuration of the adapters (adapter_config.json), instead of --model; needs --base.",
        ),
    ] = None,
    server: options.ServerOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Export a model version: its tensors, or a folder that transformers and peft read without fedplat.

    The received bytes are checked against the version's digest, and the base against the job's base_sha256.
    """
    source = _Source(model, base, adapter)
    source.check(form)
    if form is ExportFormat.SAFETENSORS:
        _export_file(context, job, output, version, server, as_json)
        return
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedplat-")))
        if _is_path(job):
            out = stack.enter_context(sessions.reporting(context, as_json))
            stored = _find_stored(job, version)
        else:
            command = stack.enter_context(sessions.session(context, server, as_json))
            out = command.output
            stored = _download(command, job, version, folder)
        _export_folder(out, stored, output, form, source)


def _export_file(
    context: typer.Context, job: str, output: Path, version: int | None, server: str | None, as_json: bool
) -> None:
    with sessions.session(context, server, as_json) as command:
        try:
            if output.is_dir() or not output.absolute().parent.is_dir():
                command.output.error(f"--to is {output}; expected a file in an existing folder")
                raise typer.Exit(sessions.WRONG_USAGE)
            with command.output.transfer("downloading the model") as progress:
                model = command.client.export_model(job, version, output, progress)
        except OSError as exc:
            command.output.error(f"{output} cannot be written: {exc.strerror or exc}")
            raise typer.Exit(sessions.FAILED) from exc
        if command.output.as_json:
            command.output.json(to_record(model) | {"path": str(output)})
            return
        command.output.line(f"wrote version {model.version} ({formats.size(model.size_bytes)}) to {output}")


def _is_path(job: str) -> bool:
    """Return whether an argument is a path: a job's name has no "/"."""
    return "/" in job or job.endswith(".safetensors")


def _find_stored(text: str, version: int | None) -> _Stored:
    """Return the model of a run folder, or of a file. Raises `DataError`."""
    if version is not None:
        raise typer.BadParameter(f"--model-version {version}: {text} has one model; expected a job for another version")
    path = Path(text)
    if not path.is_dir():
        return _Stored(path, "", str(path))
    found: Any = folders.read_json(path / folders.RUN).get("simulation", {})
    config = found.get("config", {}) if isinstance(found, dict) else {}
    return _Stored(path / folders.MODEL, str(config.get("base_sha256", "")), f"the model of {path}")


def _download(command: sessions.CommandSession, job: str, version: int | None, folder: Path) -> _Stored:
    """Download a version of a job."""
    spec = job_lists.read_spec(command.client.show_job(job))
    path = folder / folders.MODEL
    with command.output.transfer("downloading the model") as progress:
        found = command.client.export_model(job, version, path, progress)
    digest = "" if spec is None else str(spec.client_config.get("base_sha256", ""))
    return _Stored(path, digest, f"version {found.version} of {job}")


def _export_folder(out: Output, stored: _Stored, output: Path, form: ExportFormat, source: _Source) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported: an export opens no connection
    try:
        from fedplat.pytorch.huggingface import export
    except ImportError as exc:
        raise MissingExtraError(
            f"--format {form} needs PyTorch, transformers and peft; install them with: {install_command('huggingface')}"
        ) from exc

    try:
        parameters = Parameters.open(stored.path)
    except OSError as exc:
        raise DataError(f"{stored.path} cannot be read: {exc.strerror or exc}") from exc
    name: Any = form.value
    done = export.export(source.make_function(), parameters, output, name, source.base, stored.base_sha256)
    if out.as_json:
        out.json({**dataclasses.asdict(done), "folder": str(done.folder), "base": done.base and str(done.base)})
        return
    of_base = f" of the base {done.base}" if form is ExportFormat.PEFT else ""
    text = f"{done.num_tensors} tensors, {formats.size(done.size_bytes)}"
    out.line(f"wrote {stored.name} as {'adapters' if of_base else 'a whole model'}{of_base} ({text}) to {output}")
    for line in _describe_use(done):
        out.line(line)


def _describe_use(done: export.Exported) -> Iterator[str]:
    """Yield the lines of Python that load a folder, and the command that evaluates it."""
    is_peft = done.form == "peft"
    library = "peft" if is_peft else "transformers"
    loader = "AutoPeftModel" if is_peft else done.model_class
    if done.is_causal:
        loader = "AutoPeftModelForCausalLM" if is_peft else "AutoModelForCausalLM"
    yield "load it:"
    yield f"  from {library} import {loader}"
    yield f"  model = {loader}.from_pretrained({json.dumps(str(done.folder))})"
    if not done.is_causal:
        return
    source = done.base if is_peft else done.folder
    if not done.has_tokenizer:
        yield f"There is no tokenizer in {source}, which lm_eval needs: save yours there with save_pretrained."
        return
    arguments = f"pretrained={source},peft={done.folder}" if is_peft else f"pretrained={source}"
    yield "evaluate it:"
    yield f"  lm_eval --model hf --model_args {shlex.quote(arguments)} --tasks hellaswag"
