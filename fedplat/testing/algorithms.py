"""The checks of local algorithms, in short trainings of a small classifier (extra "torch").

Each check is a function that yields a sentence for each violation of the contract in `fedplat.aggregate.local`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from fedplat import aggregate, errors
from fedplat.aggregate.drift import with_control
from fedplat.aggregate.local import LossContext, LossFunction
from fedplat.client_state import ClientState
from fedplat.model import Parameters
from fedplat.pytorch import training
from fedplat.testing.errors import adopt, run_checks

NUM_INPUTS, NUM_CLASSES = 6, 4
ROUNDING = 1e-4
"""Largest difference between the loss of a batch and the mean of its examples' losses, relative to the larger one."""
SCALES = (0.0, 1e-38, 1e-20, 1.0, 1e10)
"""Factors of the gradients that `perturb` has to accept."""


def make_module() -> nn.Module:
    """Return a small classifier."""
    return nn.Sequential(nn.Linear(NUM_INPUTS, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))


LEARNER = training.Learner(model=make_module)


@dataclasses.dataclass(frozen=True)
class AlgorithmUnderTest:
    """A local algorithm, created again for each check."""

    make: Callable[[], aggregate.LocalAlgorithmOptions]

    def options(self, **changes: object) -> training.LocalOptions:
        """Return the options of a short training."""
        given = {"epochs": 2, "batch_size": 5, "learning_rate": 0.05, **changes}
        return training.LocalOptions(**given, algorithm=self.make())  # pyright: ignore[reportArgumentType]

    def build(self) -> aggregate.LocalAlgorithm:
        """Return the algorithm; its functions check their results."""
        return training.build_guarded_algorithm(self.options())

    def train(
        self, options: training.LocalOptions, client: int = 0, state: ClientState | None = None, size: int = 24
    ) -> Parameters:
        """Return the model after one client's training."""
        model = LEARNER.initial(seed=1)
        if options.build_algorithm().needs_control:
            model = with_control(model)
        inputs, targets = make_examples(client, size)
        work = training.LocalTraining(
            examples=training.TensorExamples(inputs, targets),
            options=options,
            seed=client,
            client_state=state or ClientState(),
        )
        training.train(training.Trainee(LEARNER, seed=1), model, work)
        return model

    def make_loss(self, targets: torch.Tensor) -> LossFunction | None:
        """Return the algorithm's own loss for a client with these targets, or None."""
        algorithm = self.build()
        if algorithm.make_loss is None:
            return None
        context = LossContext(
            loss=LEARNER.loss,
            read_targets=lambda: targets,
            copy_module=lambda: LEARNER.make(seed=1).eval().requires_grad_(False),
        )
        return algorithm.make_loss(context)


def make_examples(client: int, size: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the examples of a client, which has none of the last class."""
    generator = torch.Generator().manual_seed(client)
    inputs = torch.randn(size, NUM_INPUTS, generator=generator)
    return inputs, torch.randint(0, NUM_CLASSES - 1, (size,), generator=generator)


def check_algorithm(options: aggregate.LocalAlgorithmOptions) -> None:
    """Check a local algorithm. Raises `ConformanceError` for the first check that fails."""
    adopted = adopt(options, aggregate.LocalAlgorithmOptions)
    fields = {name: getattr(adopted, name) for name in getattr(adopted, "__struct_fields__", ())}
    run_checks(CHECKS, AlgorithmUnderTest(lambda: type(adopted)(**fields)))


def check_trainings_end_with_finite_weights(tested: AlgorithmUnderTest) -> Iterator[str]:
    """Require usable results, also for a client with a single example, and for one batch with all examples."""
    for size, batch_size in ((24, 5), (24, 0), (1, 5)):
        try:
            model = tested.train(tested.options(batch_size=batch_size), size=size)
        except errors.FedplatError as exc:
            yield str(exc)
            return
        for name, array in model.items():
            if not torch.from_numpy(array).isfinite().all():
                yield f"{size} examples give NaN or infinite weights in {name}; expected finite numbers"


def check_the_same_input_gives_the_same_bits(tested: AlgorithmUnderTest) -> Iterator[str]:
    """Require that a task that is computed again, maybe by another process, has the same result."""
    states = ClientState(), ClientState()
    one, two = (tested.train(tested.options(), state=state) for state in states)
    if one.to_bytes() != two.to_bytes() or _contents(states[0]) != _contents(states[1]):
        yield (
            "two trainings with the same options, data and seed return different bits; expected no clock, no memory, "
            "and no random numbers but those of torch's global generator"
        )


def check_clients_are_independent(tested: AlgorithmUnderTest) -> Iterator[str]:
    """Require that nothing is kept between trainings: the same process trains many clients, in any order."""
    options = tested.options()
    alone = tested.train(tested.options(), client=1)
    tested.train(options, client=0)
    if tested.train(options, client=1).to_bytes() != alone.to_bytes():
        yield (
            "a training gives other bits after another client's; expected all memory in the client state, which end() "
            "returns"
        )


def check_all_memory_is_in_the_client_state(tested: AlgorithmUnderTest) -> Iterator[str]:
    """Require that a client that restarts, and so has only its stored state, continues with the same bits."""
    kept, options = ClientState(), tested.options()
    tested.train(options, state=kept)
    stored = {name: Parameters.from_bytes(values.to_bytes()) for name, values in kept.contents.items()}
    continued = tested.train(options, state=ClientState(kept.contents))
    if tested.train(tested.options(), state=ClientState(stored)).to_bytes() != continued.to_bytes():
        yield "after a restart, the second training differs; expected all memory in the client state of end()"


def check_arguments_do_not_change(tested: AlgorithmUnderTest) -> Iterator[str]:
    """Require that the functions only read their arguments, which the training still needs."""
    algorithm = tested.build()
    weights = {name: value.detach().clone() for name, value in LEARNER.make(seed=1).named_parameters()}
    state = ClientState()
    tested.train(tested.options(), state=state)
    stored = next(iter(state.contents.values()), None)
    remembered = {} if stored is None else {name: torch.tensor(array) for name, array in stored.items()}
    control = {name: 0.1 * value for name, value in weights.items()} if algorithm.needs_control else {}
    for name, arguments in {"begin": (control, remembered), "perturb": (weights,)}.items():
        function = getattr(algorithm, name)
        before = [_clone(argument) for argument in arguments]
        if function is not None:
            function(*arguments)
        if any(not _equal(old, now) for old, now in zip(before, arguments, strict=True)):
            yield f"{name}() writes into an argument; expected new tensors"
    inputs, targets = make_examples(0)
    if (compute := tested.make_loss(targets)) is not None:
        before_inputs, before_targets = inputs.clone(), targets.clone()
        compute(LEARNER.make(seed=1), inputs, targets)
        if not torch.equal(inputs, before_inputs) or not torch.equal(targets, before_targets):
            yield "the loss writes into a batch; expected new tensors"


def check_the_loss_trains_the_whole_module(tested: AlgorithmUnderTest) -> Iterator[str]:
    """Require a loss of the module that it receives, in training mode, with finite gradients of every parameter."""
    inputs, targets = make_examples(0)
    for scale in (1.0, 1e4):
        if (compute := tested.make_loss(targets)) is None:
            return
        module = LEARNER.make(seed=1).train()
        loss, outputs = compute(module, scale * inputs, targets)
        loss.backward()
        if not torch.equal(outputs, module(scale * inputs)):
            yield "the loss returns other outputs than those of the module in training; metrics are computed from them"
        for name, parameter in module.named_parameters():
            if parameter.grad is None:
                yield f"the loss does not depend on {name}; expected a loss of the module that it receives"
            elif not parameter.grad.isfinite().all():
                yield f"inputs times {scale:g} give NaN or infinite gradients of {name}; expected finite numbers"
        if not module.training:
            yield "the loss changes the module to evaluation mode; expected that it stays in training mode"


def check_a_loss_that_is_a_mean_is_one(tested: AlgorithmUnderTest) -> Iterator[str]:
    """Require that several processes, each with a part of a batch, compute the same loss, if `loss_is_mean`."""
    inputs, targets = make_examples(0)
    compute = tested.make_loss(targets)
    if compute is None or not tested.build().loss_is_mean:
        return
    module = LEARNER.make(seed=1)
    whole = compute(module, inputs, targets)[0]
    parts = [compute(module, inputs[[index]], targets[[index]])[0] for index in range(len(targets))]
    average = torch.stack(parts).mean()
    found = float((whole - average).detach().abs()) / max(float(whole.detach().abs()), 1e-30)
    if found > ROUNDING:
        yield (
            f"the loss of a batch differs from the mean of its examples' losses by {found:.1e} of it; expected a loss "
            "of single examples, or loss_is_mean = False"
        )


def check_offsets_are_finite_for_all_gradients(tested: AlgorithmUnderTest) -> Iterator[str]:
    """Require finite offsets, also for gradients of zeros, which a client has at a minimum."""
    algorithm = tested.build()
    if algorithm.perturb is None:
        return
    gradients = {name: value.detach() for name, value in LEARNER.make(seed=1).named_parameters()}
    for scale in SCALES:
        try:
            algorithm.perturb({name: scale * gradient for name, gradient in gradients.items()})
        except errors.FedplatError as exc:
            yield f"with gradients times {scale:g}: {exc}"
            return


def _contents(state: ClientState) -> dict[str, bytes]:
    return {name: values.to_bytes() for name, values in state.contents.items()}


def _clone(arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: array.clone() for name, array in arrays.items()}


def _equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


CHECKS = (
    check_trainings_end_with_finite_weights,
    check_the_same_input_gives_the_same_bits,
    check_clients_are_independent,
    check_all_memory_is_in_the_client_state,
    check_arguments_do_not_change,
    check_the_loss_trains_the_whole_module,
    check_a_loss_that_is_a_mean_is_one,
    check_offsets_are_finite_for_all_gradients,
)
