"""The export of a fine-tuned model of transformers, as files that transformers and peft read without fedplat.

A PEFT folder has the adapters (LoRA: Hu et al. 2021, arXiv 2106.09685), and names the base that they belong to. A
merged folder is a whole model, whose layers have the adapters added: W + s B A, in float32, rounded once to the type
of W. Needs the extra "huggingface".
"""

from __future__ import annotations

import copy
import hashlib
import json
import secrets
import shutil
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from fedplat import durable
from fedplat.aggregate import factors
from fedplat.aggregate.local import CONTROL
from fedplat.client_state import ClientState
from fedplat.errors import DataError, MissingExtraError, ModelError
from fedplat.extras import install_command
from fedplat.model import SERVER, Parameters
from fedplat.pytorch import convert, training
from fedplat.pytorch.huggingface import scores
from fedplat.pytorch.training.frozen_base import check_base

try:
    import peft as _peft
    import safetensors.torch
    import transformers as _transformers
    from peft.tuners.tuners_utils import BaseTunerLayer as _Layer
except ImportError as exc:
    raise MissingExtraError(
        f"an export for transformers needs transformers and peft; install them with: {install_command('huggingface')}"
    ) from exc

peft: Any = _peft
transformers: Any = _transformers
Form: TypeAlias = Literal["peft", "merged"]
Terms: TypeAlias = Mapping[str, npt.NDArray[np.float32]]
"""What is added to the weights of layers [outputs, inputs], besides their adapters, by the layer's path."""

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_OTHER_FORMATS = (".bin", ".gguf", ".h5", ".index.json", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors")
"""Ends of the names of files with weights."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written: a folder in a format, for the model in the folder `base`."""

    folder: Path
    form: Form
    base: Path | None
    num_tensors: int
    """Tensors of the job's model that the folder has."""
    size_bytes: int
    model_class: str
    """The class of transformers, such as "LlamaForCausalLM"."""
    is_causal: bool
    """True for a language model that continues texts."""
    has_tokenizer: bool


@dataclass(frozen=True)
class FromFiles:
    """Makes the model of a base and the configuration of its adapters, `adapter_config.json`."""

    base: Path
    config: Path

    def __call__(self) -> torch.nn.Module:
        """Make the model. Raises `DataError`, and `ModelError` if the adapters do not fit the base."""
        path = self.config / _CONFIG if self.config.is_dir() else self.config
        try:
            config = peft.PeftConfig.from_peft_type(**json.loads(path.read_text("utf-8")))
        except OSError as exc:
            raise DataError(f"{path} cannot be read: {exc.strerror or exc}") from exc
        except (ValueError, TypeError, KeyError) as exc:
            raise DataError(f"{path} cannot be read: {exc}; expected the configuration of adapters of peft") from exc
        config.inference_mode = False  # what is trained belongs to the job's model
        try:
            return peft.get_peft_model(_load(transformers.AutoModelForCausalLM, self.base), config)
        except ValueError as exc:
            raise ModelError(f"the adapters of {path} do not fit the base {self.base}: {exc}") from exc


def export(
    make_model: Callable[[], torch.nn.Module],
    parameters: Parameters,
    folder: Path,
    form: Form,
    base: Path | None = None,
    base_sha256: str = "",
) -> Exported:
    """Write a job's model to a new or empty folder, which is complete or absent, and only its owner's to read.

    `make_model` makes the module that the job's clients train. `base` is the folder of its base; by default the one
    that the module was loaded from. The files are loaded again and compared with the model, bit for bit, before the
    folder gets its name. Raises `DataError` for folders, and `ModelError` if the model, the module, the base and its
    SHA-256 do not belong together.
    """
    check_folders(folder, base)
    own, terms = split_terms(parameters)
    module = _load_trained(make_model, parameters, base_sha256)
    model_class, is_causal = type(_base_of(module)).__name__, scores.is_causal(_base_of(module))
    base = base or _find_base(module)
    write = _write_adapters if form == "peft" else _write_merged
    with _replacing(folder) as temporary, _quiet():
        count = write(module, own, terms, base, temporary)
        for path in temporary.iterdir():
            path.chmod(0o600)  # a model may reveal its training data
        size = sum(path.stat().st_size for path in temporary.iterdir())
    files = folder if form == "merged" or base is None else base
    return Exported(
        folder=folder,
        form=form,
        base=base,
        num_tensors=count,
        size_bytes=size,
        model_class=model_class,
        is_causal=is_causal,
        has_tokenizer=any((files / name).is_file() for name in _TOKENIZERS),
    )


def check_folders(folder: Path, base: Path | None) -> None:
    """Raise `DataError` unless `folder` can be written, and `base` is a folder with a model of transformers."""
    if folder.exists() and not (folder.is_dir() and next(folder.iterdir(), None) is None):
        what = "is not empty" if folder.is_dir() else "is a file"
        raise DataError(f"{folder} {what}; expected a folder that does not exist or is empty")
    if not folder.absolute().parent.is_dir():
        raise DataError(f"{folder} cannot be made; expected a folder in an existing one")
    if base is not None and not (base / "config.json").is_file():
        raise DataError(f"the base {base} has no config.json; expected the folder of a model of transformers")
    if base is not None:
        try:
            described = json.loads((base / "config.json").read_text("utf-8"))
        except (OSError, ValueError) as exc:
            raise DataError(f"{base / 'config.json'} cannot be read: {exc}") from exc
        if not isinstance(described, dict) or "model_type" not in described:
            # transformers would make a model of its class with default sizes, such as 7 billion parameters
            raise DataError(f"{base / 'config.json'} has no model_type; expected that of a model of transformers")


def split_terms(parameters: Parameters) -> tuple[Parameters, Terms]:
    """Return the tensors that clients train, and the terms s · lora_BA that only the server writes (FedEx-LoRA, FLoRA).

    Raises `ModelError` for terms without their scaling s.
    """
    terms: dict[str, npt.NDArray[np.float32]] = {}
    for name in parameters:
        if name.startswith(SERVER) and name != factors.SCALING:
            if factors.SCALING not in parameters:
                raise ModelError(f"the model has {name!r}, but no {factors.SCALING!r}; expected both")
            term = np.asarray(parameters[name], np.float32) * np.float32(parameters[factors.SCALING][0])
            if term.any():
                terms[factors.split_product_name(name)[0]] = term
    own = {name: parameters[name] for name in parameters if not name.startswith((SERVER, CONTROL))}
    return Parameters.from_arrays(own), terms


def _load_trained(make_model: Callable[[], torch.nn.Module], parameters: Parameters, base_sha256: str) -> Any:
    """Return the module with the values of the job's model."""
    if not parameters.is_finite():
        raise ModelError("the model holds NaN or infinite values; expected finite ones")
    learner = training.Learner(model=make_model, share="trained", accuracy="none")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # to peft
        trainee = training.Trainee(learner)
    module: Any = trainee.module.eval()
    if not isinstance(module, transformers.PreTrainedModel | peft.PeftModel):
        raise ModelError(
            f"the model is a {type(module).__name__}; expected a model of transformers, with or without "
            "adapters of peft"
        )
    if getattr(_base_of(module), "is_quantized", False):
        raise ModelError("the base is quantized, which cannot be exported; expected one in bfloat16 or float32")
    assert trainee.base is not None
    check_base(trainee.base, base_sha256)
    received = Parameters.from_arrays({name: parameters[name] for name in parameters if not name.startswith(CONTROL)})
    if trainee.base.names & set(received):  # a job with share = "all"
        convert.load_into(module, received)
    else:
        trainee.load(received, ClientState())
    return module


def _base_of(module: Any) -> Any:
    """Return the model of transformers, which has adapters of peft in it or not."""
    return module.get_base_model() if isinstance(module, peft.PeftModel) else module


def _find_base(module: Any) -> Path | None:
    """Return the folder that a model was loaded from."""
    name = getattr(_base_of(module), "name_or_path", "")
    return Path(name) if name and (Path(name) / "config.json").is_file() else None


def _write_adapters(module: Any, own: Parameters, terms: Terms, base: Path | None, folder: Path) -> int:
    """Write a PEFT folder, and return the number of its tensors."""
    if not isinstance(module, peft.PeftModel):
        raise ModelError(f"the model is a {type(module).__name__} without adapters; expected the format merged")
    if terms:
        raise ModelError(
            f"the server has added a term to the weight of {min(terms)!r}, which adapters cannot have; expected the "
            "format merged"
        )
    if base is None:
        raise DataError(
            "the model was not loaded from a folder, and the adapters must name their base; expected its folder "
            "(--base DIR), such as save_pretrained of the model without adapters writes"
        )
    adapter = _find_adapter(module)
    state = peft.get_peft_model_state_dict(module, adapter_name=adapter, save_embedding_layers=False)
    # Without the embeddings, of which peft would look for the first size on the Hub; a changed one is found below.
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    safetensors.torch.save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    config = copy.deepcopy(module.peft_config[adapter])
    config.base_model_name_or_path, config.inference_mode = str(base.resolve()), True
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)
    base_class = type(_base_of(module))
    if config.task_type is None and scores.is_causal(_base_of(module)):
        config.task_type = peft.TaskType.CAUSAL_LM
    elif config.task_type is None:
        config.auto_mapping = {"base_model_class": base_class.__name__, "parent_library": base_class.__module__}
    config.save_pretrained(folder)
    expected = _digests(module)
    del module
    written = peft.PeftModel.from_pretrained(_load(base_class, base), folder, adapter_name=adapter)
    if name := _find_difference(expected, _digests(written)):
        if name in own:
            raise ModelError(
                f"the tensor {name!r} was trained, but it is not of the adapters; expected the format merged"
            )
        raise ModelError(
            f"the base {base} is another one than that of the model: the tensor {name!r} differs; expected the folder "
            "that the clients have"
        )
    return len(tensors)


def _find_adapter(module: Any) -> str:
    names = list(module.peft_config)
    if "default" in names:
        return "default"
    if len(names) == 1:
        return names[0]
    raise ModelError(f'the model has the adapters {", ".join(names)}; expected one, or one of the name "default"')


def _write_merged(module: Any, own: Parameters, terms: Terms, base: Path | None, folder: Path) -> int:
    """Write the folder of a whole model, with the other files of its base, and return the number of its tensors."""
    merged = merge(module, terms) if isinstance(module, peft.PeftModel) else module
    if terms and merged is module:
        raise ModelError(f"the server has added a term to {min(terms)!r}, and the model has no adapters")
    merged.save_pretrained(folder)
    for path in base.iterdir() if base is not None else ():
        is_own = path.name.startswith(".") or path.name.endswith(_OTHER_FORMATS) or path.name in ("README.md", _CONFIG)
        if path.is_file() and not is_own and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    expected, model_class = _digests(merged), type(merged)
    count = len(convert.leave_out_ties(merged.state_dict()))
    del module, merged
    if name := _find_difference(expected, _digests(_load(model_class, folder))):
        raise ModelError(f"transformers does not read the tensor {name!r} as it was written; report it as a bug")
    return count


def merge(module: Any, terms: Terms | None = None) -> Any:
    """Return the model of transformers within a model of peft, whose weights have the adapters and `terms` added.

    A weight is added up in float32, and rounded once to its own type. Raises `ModelError`. `module` is used up.
    """
    state = module.state_dict()
    rest, ties = dict(terms or {}), convert.find_tied_names(state)
    tied = {*ties, *ties.values()}
    for place, layer in module.named_modules():
        if not isinstance(layer, _Layer):
            continue
        inner: Any = layer.get_base_layer()
        name = place.removeprefix("base_model.model.")
        if shared := sorted(tied & {f"{place}.base_layer.{key}" for key in inner.state_dict()}):
            raise ModelError(
                f"the weight {shared[0]!r} has adapters, and is the weight of another layer, too, which a merged model "
                "would change; expected the format peft"
            )
        types = {key: value.dtype for key, value in inner.named_parameters()}
        inner.float()
        layer.merge(safe_merge=True)
        if (term := rest.pop(place, None)) is not None:
            _add_term(inner.weight, term.T if type(inner).__name__ == "Conv1D" else term, name)
        for key, value in inner.named_parameters():
            value.data = value.data.to(types[key])
            if not bool(torch.isfinite(value.data).all()):
                raise ModelError(f"the merged weight of {name!r} does not fit into {types[key]}; expected a wider type")
    if rest:
        raise ModelError(f"the server has added a term to {min(rest)!r}, and the model has no adapters there")
    return module.unload()


def _add_term(weight: torch.Tensor, term: npt.NDArray[np.float32], name: str) -> None:
    if tuple(weight.shape) != term.shape:
        raise ModelError(f"the term of {name!r} has the shape {list(term.shape)}; expected {list(weight.shape)}")
    weight.data += torch.from_numpy(term)


def _load(model_class: Any, folder: Path) -> Any:
    """Load a model from a folder. Raises `DataError`."""
    try:
        return model_class.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError) as exc:
        first = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        raise DataError(f"transformers cannot load the model in {folder}: {first}") from exc


def _digests(module: torch.nn.Module) -> dict[str, str]:
    """Return a digest of the shape and the values of each tensor; equal values of different types have the same."""
    digests: dict[str, str] = {}
    for name, tensor in module.state_dict().items():
        wide = tensor.detach().cpu()
        wide = wide.float() if wide.is_floating_point() else wide
        content = wide.contiguous().reshape(-1).view(torch.uint8).numpy().data
        digests[name] = f"{list(tensor.shape)} {hashlib.sha256(content).hexdigest()}"
    return digests


def _find_difference(expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Return the first name whose tensors differ, or which only one of the modules has; "" without one."""
    names = (*expected, *(name for name in found if name not in expected))
    return next((name for name in names if expected.get(name) != found.get(name)), "")


@contextmanager
def _replacing(folder: Path) -> Generator[Path]:
    """Yield a folder beside `folder`, whose name it gets at the end; it is removed after an error."""
    temporary = folder.absolute().with_name(f".fedplat-{secrets.token_hex(8)}.tmp")
    try:
        temporary.mkdir(mode=0o700)
        yield temporary
        durable.rename_folder(temporary, folder.absolute())
    except OSError as exc:
        raise DataError(f"{folder} cannot be written: {exc.strerror or exc}") from exc
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _quiet() -> Generator[None]:
    """Turn off the hints and bars of transformers, and warnings of peft about what is compared anyway."""
    logs = transformers.utils.logging
    before, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logs.set_verbosity(before)
        if bars:
            logs.enable_progress_bar()
