"""Local training with example-level privacy: DP-SGD.

Source: Abadi et al. 2016, "Deep Learning with Differential Privacy", arXiv 1607.00133, Algorithm 1. A step draws each
example with the same probability, sums their clipped gradients, adds noise, and divides by the expected number of
examples, which does not depend on the draw. Everything after the noise (momentum, weight decay, the pull of FedProx,
the variates of SCAFFOLD and FedDyn, a custom optimizer) is computed from noised gradients alone, and so costs no
privacy (Noble, Bellet and Dieuleveut 2022, arXiv 2111.09278, show it for SCAFFOLD).

The report contains the update, the number of steps, the noise and epsilon. It has no loss and no accuracy, which would
reveal single examples, and the module's other values, such as counters, keep their initial values. The number of
examples is reported as always; it is not protected.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from fedplat import errors, local_options
from fedplat.privacy.steps import StepCharge
from fedplat.pytorch import dp
from fedplat.pytorch.training import examples, gradients, learner, meaning
from fedplat.pytorch.training.stepper import Stepper


@dataclass(frozen=True, kw_only=True)
class PoissonPlan:
    """The steps of a private training: as many as without privacy for these examples, each with its own Poisson draw.

    `noise` is the source of randomness.
    """

    plan: examples.StepSchedule
    noise: dp.StepNoise

    @property
    def probability(self) -> float:
        """The probability of each example to be in a step."""
        return min(1.0, self.plan.step_size / self.plan.num_examples)

    @property
    def expected(self) -> float:
        """The expected number of examples of a step."""
        return self.probability * self.plan.num_examples

    def steps(self) -> Iterator[examples.Indices]:
        """Yield the examples of each step; a step may be empty."""
        for _ in range(self.plan.num_steps):
            yield self.noise.draw_examples(self.plan.num_examples, self.probability)

    def charge(self, options: local_options.LocalOptions) -> StepCharge:
        """Return the privacy cost of all steps."""
        return StepCharge(options.dp_noise_multiplier, self.probability, self.plan.num_steps)


def run(trainee: learner.Trainee, stepper: Stepper, work: gradients.LocalTraining) -> tuple[Mapping[str, float], int]:
    """Run all steps; return the metrics and the number of steps.

    Charges the ledger before the first step. Raises `PrivacyLimitError` and `ModelError` before any step is made.
    """
    dp.check(trainee.module)
    if meaning.weighs_classes(trainee.learner.loss):
        raise errors.ModelError(
            "the loss has weights of classes, which cancel in the loss of a single example, as example-level privacy "
            "needs it; expected a loss of your own that multiplies: (weight[targets] * cross_entropy(outputs, targets, "
            'reduction="none")).mean()'
        )
    plan = PoissonPlan(
        plan=examples.StepSchedule(
            num_examples=len(work.examples), options=work.options, seed=work.seed, fraction=work.fraction
        ),
        noise=dp.make_noise(work.noise_seed),
    )
    ledger = work.ledger or dp.RecordedLedger(work.client_state)
    options, planned, made = work.options, plan.charge(work.options), 0
    module, kind = trainee.module.train(), options.dp
    assert kind != "none"
    with (
        dp.clipping(module, trainee.learner.batch_loss, kind, options.dp_max_grad_norm) as clipper,
        _restore_buffers(module),
    ):
        ledger.charge(planned)
        try:
            for made in _steps(stepper, plan, work, clipper):
                if not work.after_step(made, planned.num_steps):
                    break
        finally:
            charges = ledger.settle(planned, made)
    metrics = {
        "epsilon": dp.epsilon(charges, options.dp_delta),
        "noise_multiplier": options.dp_noise_multiplier,
        "private_steps": float(sum(each.num_steps for each in charges)),
    }
    return metrics, made


def _steps(stepper: Stepper, plan: PoissonPlan, work: gradients.LocalTraining, clipper: dp.Clipper) -> Iterator[int]:
    """Run the steps; yield the number of steps made after each."""
    deviation = work.options.dp_noise_multiplier * work.options.dp_max_grad_norm
    steps, ahead = itertools.tee(plan.steps())
    batches = work.examples.batches(itertools.chain.from_iterable(map(plan.plan.batches_of, ahead)))
    for number, step in enumerate(steps, 1):
        for _ in plan.plan.batches_of(step):
            clipper.add(*next(batches))
        stepper.set_gradients([plan.noise.add_noise(total, deviation) / plan.expected for total in clipper.take()])
        stepper.step()
        yield number


@contextmanager
def _restore_buffers(module: nn.Module) -> Generator[None]:
    """Restore the module's buffers at the end of the block: they changed without noise."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)
