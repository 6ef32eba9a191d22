"""The subject of training: a module, its loss in local steps, and the layers that stay on the client."""

from __future__ import annotations

import copy
import fnmatch
import functools
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import nn

from fedplat import errors, local_options, randomness
from fedplat.aggregate.local import CONTROL, Arrays, LocalAlgorithm, LossContext, LossFunction
from fedplat.client_state import ClientState
from fedplat.config.plugins import adopt
from fedplat.metrics import Metric
from fedplat.model import SERVER, Parameters
from fedplat.model.turns import Turn
from fedplat.pytorch import convert as backend
from fedplat.pytorch.training.examples import Examples, Indices, iterate_batches
from fedplat.pytorch.training.frozen_base import BATCH_NORMS, FrozenBase, changing_tensors
from fedplat.pytorch.training.hidden_state import HiddenState
from fedplat.pytorch.training.meaning import (
    Accuracy,
    ClassWeights,
    CountAnswers,
    Loss,
    OwnLoss,
    Scores,
    Sums,
    check_reduction,
    choose_count,
    choose_weights,
    guard,
)
from fedplat.pytorch.training.server_terms import ServerTerms, widen_ranks

BATCH_NORM = "@batch_norm"
"""In `personal`, stands for all tensors of BatchNorm layers: FedBN (Li et al. 2021, arXiv 2102.07623)."""
Share: TypeAlias = Literal["all", "trained"]
_NOTE = "personal"
_trained = weakref.WeakValueDictionary[int, object]()
"""The modules, and their tensors that training changes, that have had other values than their initial ones, by `id`."""


@dataclass(frozen=True, kw_only=True)
class Learner:
    """A module's factory, its loss and its metrics.

    `personal` are names of tensors, with wildcards ("head.*"), that stay on the client: they are not part of the job's
    model, are never sent, and are stored in the client state. Source: Arivazhagan et al. 2019, "Federated Learning with
    Personalization Layers", arXiv 1912.00818.

    With `share` = "trained" the job's model has only what training changes: the parameters with `requires_grad`, and
    the statistics of BatchNorm layers. All other tensors are the base, which each participant has itself, such as the
    weights below a new head, or those that an adapter of a language model is added to.
    """

    model: Callable[[], nn.Module]
    """Creates the module; the job's values replace its initial ones."""
    loss: Loss = nn.functional.cross_entropy
    """Mean loss of a batch of (output, target)."""
    personal: tuple[str, ...] = ()
    share: Share = "all"
    metrics: tuple[Metric, ...] = ()
    """Metrics of evaluations, besides `loss` and `accuracy`; training does not compute them."""
    accuracy: Accuracy = "auto"
    """Which answers are correct: a function of (outputs, targets) that returns a tensor of booleans; or "classes", if
    the outputs are [examples, classes, ...] with the largest at the answer. "auto" is "classes" for PyTorch's losses of
    classes, and no accuracy for others, since only the author of a loss knows what it makes of the outputs."""

    def __post_init__(self) -> None:
        for metric in self.metrics:
            adopt(metric, Metric)
        if self.share not in ("all", "trained"):
            raise ValueError(f'share = {self.share!r}: expected "all" or "trained"')
        choose_count(self.accuracy, self.loss)
        check_reduction(self.loss)

    @functools.cached_property
    def batch_loss(self) -> Loss:
        """The loss, which refuses outputs that PyTorch would misunderstand."""
        return guard(self.loss)

    @property
    def has_unknown_answers(self) -> bool:
        """True if the loss is the author's own, who has not stated which answers are correct."""
        return self.accuracy == "auto" and isinstance(self.batch_loss, OwnLoss)

    @functools.cached_property
    def count_answers(self) -> CountAnswers | None:
        """Counts correct answers of a batch; None without an accuracy."""
        return choose_count(self.accuracy, self.loss)

    @functools.cached_property
    def class_weights(self) -> ClassWeights | None:
        """The weights of targets in a loss of classes; None for other losses."""
        return choose_weights(self.loss)

    def make_scores(self, metrics: tuple[Metric, ...] = ()) -> Scores:
        """Return scores without batches yet."""
        return Scores(self.count_answers, metrics, self.class_weights)

    def make(self, device: torch.device | str = "cpu", seed: int = 0) -> nn.Module:
        """Create the module with initial values from a seed. PyTorch's global random state is restored afterwards.

        Raises `ModelError` for a lazy module, which has no values before its first batch.
        """
        with use_seed(torch.device("cpu"), seed):
            module = self.model()
        for name, parameter in module.named_parameters():
            if nn.parameter.is_lazy(parameter):
                raise errors.ModelError(
                    f"the parameter {name!r} has no shape yet; expected the function of the model to call a lazy "
                    "module once, with a batch of zeros"
                )
        return module.to(device)

    def initial(self, seed: int = 0) -> Parameters:
        """Return the initial model of a job: the values of a new module, without personal tensors and the base.

        Raises `ModelError` if the factory returns a module that was trained before.
        """
        trainee = Trainee(self, seed=seed)
        _refuse_trained(trainee.module, _find_trained(trainee.module))
        return backend.from_state_dict(trainee.shared_tensors())

    def base_sha256(self) -> str:
        """Return the SHA-256 of a new module's base, which a job with `share` = "trained" has in its `[config]`.

        Raises `ModelError` if the module has no base.
        """
        base = Trainee(self).base
        if base is None:
            raise errors.ModelError('a learner with share = "all" has no base; expected share = "trained"')
        return base.sha256


class Trainee:
    """A module that is trained and evaluated repeatedly, each time from given values."""

    def __init__(self, learner: Learner, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.learner = learner
        self.device = torch.device(device)
        self.module = learner.make(device, seed)
        self.has_batch_norm = has_batch_norm(self.module)
        state = self.module.state_dict()
        personal = frozenset(_personal_names(self.module, learner.personal))
        ties = backend.find_tied_names(state)
        self.base = FrozenBase(self.module) if learner.share == "trained" else None
        """The tensors that training does not change and that are not in the job's model; None if all are in it."""
        own = frozenset[str]() if self.base is None else self.base.names
        self.personal = personal - own
        self._first = {name: state[name].clone() for name in state if name in self.personal}
        apart = self.personal | own
        self._ties = {name: first for name, first in ties.items() if not apart & {name, first}}
        self.left_out = own | self._ties.keys()
        """Names of tensors that neither the job's model nor a client's state has: the base, and further names."""
        self.hidden = HiddenState(self.module, learner.loss)
        self._server_terms = ServerTerms(self.module)
        self._used = _find_trained(self.module)
        self._is_registered = False

    @property
    def smallest_batch(self) -> int:
        """The minimum number of examples in a training batch."""
        return 2 if self.has_batch_norm else 1

    def shared_tensors(self) -> dict[str, torch.Tensor]:
        """Return the module's tensors that are part of the job's model."""
        apart = self.personal if self.base is None else self.personal | self.base.names
        return {name: tensor for name, tensor in self.module.state_dict().items() if name not in apart}

    def load(self, parameters: Parameters, client_state: ClientState) -> None:
        """Load the values of the job's model, and the client's personal ones, into the module. Raises `ModelError`.

        The module forgets what it remembers of an earlier training or evaluation.
        """
        if not self._is_registered:
            _trained.update({id(each): each for each in (self.module, *changing_tensors(self.module).values())})
            self._is_registered = True
        self.forget()
        received = backend.to_torch(parameters)
        self._server_terms.load(received, self.device)
        values = self._fit_ranks(received)
        if both := sorted(self.personal & values.keys()):
            raise errors.ModelError(
                f"the tensor {both[0]!r} is personal, but the job's model has it; expected a model without personal "
                "tensors, such as Learner.initial() returns"
            )
        note = client_state.get(_NOTE) if self.personal else None
        if note is None:
            _refuse_trained(self.module, self._used & self.personal)
        values = backend.fill_ties(values, self._ties) if self._ties else values
        values |= self._first if note is None else backend.to_torch(note)
        if self.base is not None:
            self.base.check_fit(values)
        try:
            self.module.load_state_dict(values, strict=self.base is None)
        except RuntimeError as exc:
            name = type(self.module).__name__
            raise errors.ModelError(f"the model does not fit the module {name}: {exc}") from exc

    def check_base_unchanged(self) -> None:
        """Raise `ModelError` if the base has changed, which stays behind when the job's model leaves."""
        if self.base is not None:
            self.base.check_unchanged()

    def forget(self) -> None:
        """Forget what the module and the loss remember of a training or evaluation, outside the model."""
        self.hidden.restore()

    def save(self, parameters: Parameters, client_state: ClientState) -> None:
        """Copy the module's values into the job's model, and the personal ones into the client state.

        Raises `ModelError` if the base has changed.
        """
        self.check_base_unchanged()
        shared = {name: tensor for name, tensor in self.shared_tensors().items() if name in parameters}
        parameters.assign({**parameters, **widen_ranks(backend.to_arrays(shared), parameters)})
        if self.personal:
            state = self.module.state_dict()
            client_state.put(
                _NOTE, backend.store_tensors({name: state[name] for name in state if name in self.personal})
            )

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained, by name."""
        return {name: value for name, value in self.module.named_parameters() if value.requires_grad}

    def start_weights(self, parameters: Parameters) -> dict[str, torch.Tensor]:
        """Return the initial values of the trained parameters that are not personal, after `load`."""
        model = backend.fill_ties(self._fit_ranks(backend.to_torch(parameters)), self._ties)
        return {name: model[name].to(self.device) for name in self.parameters() if name not in self.personal}

    def _fit_ranks(self, received: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of a model that are the module's, with the ranks of the module's adapters."""
        if not any(name.startswith(SERVER) for name in received):
            return {name: tensor for name, tensor in received.items() if not name.startswith(CONTROL)}
        shapes = {name: tensor.shape for name, tensor in self.shared_tensors().items()}
        fitted = self._server_terms.fit_ranks(received, shapes)
        return {name: tensor for name, tensor in fitted.items() if not name.startswith((CONTROL, SERVER))}

    @contextmanager
    def train_in_turn(self, alternate: str, round_number: int) -> Generator[None]:
        """Train within the block, of groups of tensors, only the group of a round; "" for all tensors.

        `alternate` has the names of the groups, with wildcards, separated by commas; rounds count from 1. The others
        keep their values, and tensors of no group are trained in each round. Raises `ModelError` for a group without
        trained tensors.
        """
        turn, trained = Turn.of(alternate, round_number), self.parameters()
        for group in turn.groups:
            if not any(fnmatch.fnmatchcase(name, group) for name in trained):
                raise errors.ModelError(
                    f'config.alternate = "{alternate}": {group!r} matches none of the trained tensors: '
                    f"{', '.join(list(trained)[:20])}"
                )
        resting = [trained[name] for name in turn.list_resting(trained)]
        for parameter in resting:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in resting:
                parameter.requires_grad_(True)

    def step_options(self, options: local_options.LocalOptions) -> local_options.LocalOptions:
        """Return the options of steps, without those that the module itself carries out."""
        return options

    def check_algorithm(self, options: local_options.LocalOptions, algorithm: LocalAlgorithm) -> None:
        """Raise `ValueError` if the module cannot be trained by a local algorithm."""

    def evaluate(
        self, examples: Examples, batch_size: int, after_batch: Callable[[int], object] = lambda done: None
    ) -> Sums:
        """Return the scores of the module, as it is, on all examples; see `evaluate_batches`."""
        return self.evaluate_batches(examples, iterate_batches(len(examples), batch_size), after_batch).sums()

    def evaluate_batches(
        self, examples: Examples, order: Iterable[Indices], after_batch: Callable[[int], object] = lambda done: None
    ) -> Scores:
        """Return the scores of the module, as it is, on some batches, without training.

        `after_batch` is called with the number of examples done.
        """
        self.module.eval()
        scores, done = self.learner.make_scores(self.learner.metrics), 0
        with torch.no_grad():
            for inputs, targets in examples.batches(order):
                outputs = self.module(inputs)
                scores.add(self.learner.batch_loss(outputs, targets), outputs, targets)
                done += len(targets)
                after_batch(done)
        return scores


def has_batch_norm(module: nn.Module) -> bool:
    """Return whether a module has BatchNorm layers."""
    return any(isinstance(part, BATCH_NORMS) for part in module.modules())


def choose_device(name: str = "auto") -> torch.device:
    """Return a device by its name; "auto" is CUDA if available, else the CPU."""
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(automatic if name == "auto" else name)


@contextmanager
def use_seed(device: torch.device, seed: int) -> Generator[None]:
    """Seed all randomness of the process (`use_seeds`) and of a GPU within the block; restore its state at the end."""
    with randomness.use_seeds(seed) as number:
        if device.type != "cuda":
            yield
            return
        torch.cuda.init()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        before = generator.get_state()
        generator.manual_seed(number)
        try:
            yield
        finally:
            generator.set_state(before)


def _find_trained(module: nn.Module) -> frozenset[str]:
    """Return the names of a new module's tensors that were trained before, in another module or in the same one."""
    names = frozenset(name for name, value in changing_tensors(module).items() if _trained.get(id(value)) is value)
    return frozenset(module.state_dict()) if _trained.get(id(module)) is module else names


def _refuse_trained(module: nn.Module, names: Collection[str]) -> None:
    """Raise `ModelError` if there are names of tensors that were trained before."""
    if not names:
        return
    kind, name = type(module).__name__, min(names)
    what = f"the same {kind}" if _trained.get(id(module)) is module else f"a {kind} with the same tensor {name!r}"
    raise errors.ModelError(
        f"the function of the model returned {what} again, which was trained since; expected a new module from each "
        "call: create it inside the function, not outside"
    )


def _personal_names(module: nn.Module, patterns: tuple[str, ...]) -> Iterator[str]:
    """Yield the names of the module's tensors that match the patterns. Raises `ValueError` for one without a match."""
    names = list(module.state_dict())
    for pattern in patterns:
        if pattern == BATCH_NORM:
            layers = [name for name, part in module.named_modules() if isinstance(part, BATCH_NORMS)]
            matches = [name for name in names if name.rpartition(".")[0] in layers]
        else:
            matches = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matches:
            raise ValueError(f"personal = {pattern!r} matches none of the module's tensors: {', '.join(names[:20])}")
        yield from matches


_READ_BATCH_SIZE = 1024


def make_loss(learner: Learner) -> LossFunction:
    """Return the loss of a learner as a function of its module and a batch."""
    loss_of = learner.batch_loss

    def compute(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = module(inputs)
        return loss_of(outputs, targets), outputs

    return compute


def make_own_loss(
    algorithm: LocalAlgorithm, trainee: Trainee, examples: Examples, remembered: Arrays, seed: int
) -> LossFunction:
    """Return the loss of an algorithm for one client's training, or the learner's if it has none of its own.

    The module must have the received values. Random draws of `make_loss` follow from `seed`, and leave those of the
    training as they are.
    """
    if algorithm.make_loss is None:
        return make_loss(trainee.learner)
    context = LossContext(
        loss=trainee.learner.batch_loss,
        read_targets=lambda: read_targets(examples),
        copy_module=lambda: copy.deepcopy(trainee.module).eval().requires_grad_(False),
        remembered=remembered,
    )
    with use_seed(trainee.device, seed):
        return algorithm.make_loss(context)


def read_targets(examples: Examples) -> torch.Tensor:
    """Return the targets of all examples, in their order."""
    order = iterate_batches(len(examples), _READ_BATCH_SIZE)
    return torch.cat([targets for _, targets in examples.batches(order)])


def forward_features(module: nn.Module, inputs: torch.Tensor, layer: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """Return a module's outputs and its features: the inputs of the layer of that name, by default its last linear one.

    Shapes: [batch, ...] and [batch, size]. Raises `ValueError` if the module has no such layer, or does not use it.
    """
    linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
    if not layer and not linear:
        raise ValueError(
            f"{type(module).__name__} has no linear layer; expected the name of the layer after its features"
        )
    chosen = module.get_submodule(layer) if layer else linear[-1]
    found: list[torch.Tensor] = []
    handle = chosen.register_forward_pre_hook(lambda part, arguments: found.append(arguments[0]))
    try:
        outputs = module(inputs)
    finally:
        handle.remove()
    if not found:
        raise ValueError(f"the layer {layer or 'of the features'} is not used by {type(module).__name__}")
    return outputs, found[-1].flatten(1)
