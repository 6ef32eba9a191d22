"""Models of transformers with adapters of peft: rounds that are one longer run, scores by tokens, and clean ends."""

from __future__ import annotations

import gc
import itertools
import json
import random
import socket
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")
import tokenizers
import torch
import transformers

from fedplat.client_state import ClientState
from fedplat.config import user_code
from fedplat.errors import DataError, EngineError, JobFileError, ModelError
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.pytorch.huggingface import HuggingFaceConfig, HuggingFaceLearner, tokenizer_sha256
from fedplat.pytorch.training import FrozenBase
from fedplat.simulation import Federation, simulate
from fedplat.simulation.scenario.file import parse
from fedplat.testing import check_learner
from fedplat_client import Cancelled, ClientOptions, Task
from fedplat_client.task import Control
from fedplat_client.trainers.huggingface import HuggingFaceTrainer
from fedplat_client.trainers.torch import TorchTrainer
from support import language
from support.docs import blocks
from support.jobs import write_job

pytestmark = pytest.mark.slow  # the imports alone take 10 seconds
LEARNER = HuggingFaceLearner(model=language.make_adapted)
DATA = language.Text(40, seed=1)
ARGUMENTS = {"learning_rate": 1e-2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
START, BASE = LEARNER.initial(), LEARNER.base_sha256()


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def make_trainer(**options: Any) -> HuggingFaceTrainer:
    given: dict[str, Any] = {"model": language.make_adapted, "data": DATA, "arguments": ARGUMENTS}
    return HuggingFaceTrainer(**given | options)


def make_task(parameters: Parameters = START, **options: Any) -> Task:
    config = {"max_steps": 2, "base_sha256": BASE, **options.pop("config", {})}
    return Task(name="chat", parameters=parameters.copy(), config=config, **options)


def run_rounds(trainer: HuggingFaceTrainer, num_rounds: int, max_steps: int, **config: Any) -> Parameters:
    model, state = START, ClientState()
    for number in range(1, num_rounds + 1):
        task = make_task(
            model,
            round=number,
            num_rounds=num_rounds,
            client_state=state,
            config={"max_steps": max_steps, "keep_optimizer": True, "schedule": "job", **config},
        )
        result = trainer(task).parameters
        assert isinstance(result, Parameters)
        model = result
    return model


def test_the_rounds_of_a_client_are_one_run() -> None:
    used: list[int] = []

    class Noting(language.Text):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            used.append(index)
            return super().__getitem__(index)

    arguments = ARGUMENTS | {"lr_scheduler_type": "cosine", "warmup_steps": 2}
    trainer = make_trainer(data=Noting(40, seed=1), arguments=arguments)
    apart = run_rounds(trainer, 5, 4)
    assert len(used) == 5 * 4 * 8
    assert np.bincount(used).tolist() == [4] * 40  # each of the 40 examples in each of 4 epochs
    whole = run_rounds(trainer, 1, 20)
    assert len(trainer._learner._idle) == 1  # pyright: ignore[reportPrivateUsage] -- the model was made once
    np.testing.assert_array_equal(apart.buffer, whole.buffer)
    assert not np.array_equal(run_rounds(trainer, 5, 4, keep_optimizer=False).buffer, apart.buffer)
    assert not np.array_equal(run_rounds(trainer, 5, 4, schedule="round").buffer, apart.buffer)


def make_base() -> Any:
    """A GPT-2 of 124,672 numbers, of which the adapters change c_attn."""
    return language.make_gpt2(width=64, num_tokens=256, num_positions=128)


def make_both() -> Any:
    return language.with_adapters(make_base(), targets=("c_attn",))  # layers that store their weights transposed


def make_ffa() -> Any:
    model = make_both()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    return model


@pytest.mark.parametrize(
    ("make", "personal", "num_bytes"),
    [
        (make_base, (), 498_688),  # all weights, the tied ones once
        (make_both, (), 8192),  # two layers, A [4, 64] and B [192, 4]
        (make_ffa, (), 6144),
        (make_both, ("*lora_B*",), 2048),  # FedSA
    ],
)
def test_only_what_is_trained_and_shared_travels(make: Any, personal: tuple[str, ...], num_bytes: int) -> None:
    learner = HuggingFaceLearner(model=make, personal=personal)
    start = learner.initial()
    assert len(start.buffer) == num_bytes
    base = learner.base_sha256()
    trainer = HuggingFaceTrainer(model=make, data=DATA, arguments=ARGUMENTS, personal=personal)
    result = trainer(make_task(start, config={"base_sha256": base}))
    assert isinstance(result.parameters, Parameters)
    assert result.metrics["local_steps"] == 2
    assert result.parameters.schema == start.schema
    assert not np.array_equal(result.parameters.buffer, start.buffer)
    with trainer._learner.borrow(HuggingFaceConfig(base_sha256=base)) as trainee:  # pyright: ignore[reportPrivateUsage]
        assert FrozenBase(trainee.module).sha256 == base  # computed anew


def test_thirty_rounds_take_no_more_memory_than_three() -> None:
    trainer = make_trainer()
    sizes: list[tuple[int, int]] = []
    for num_rounds in (3, 27):
        run_rounds(trainer, num_rounds, 1)
        gc.collect()
        tensors = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
        sizes.append((tensors, psutil.Process().memory_info().rss))
    (tensors, before), (same, after) = sizes
    assert same == tensors
    assert after <= 1.02 * before


def test_scores_are_means_over_tokens() -> None:
    trainer = make_trainer()
    model = run_rounds(trainer, 1, 8)
    module = language.make_adapted()
    module.load_state_dict({name: torch.tensor(model[name]) for name in model}, strict=False)
    losses, hits = [], []
    with torch.no_grad():
        for example in (DATA[index] for index in range(len(DATA))):
            logits = module.eval()(example["input_ids"][None], example["attention_mask"][None]).logits[0, :-1]
            labels = example["labels"][1:]
            kept = labels != -100
            losses += torch.nn.functional.cross_entropy(logits[kept], labels[kept], reduction="none").tolist()
            hits += (logits[kept].argmax(1) == labels[kept]).tolist()
    for batch_size in (1, 7, 64):
        result = trainer.evaluate(make_task(model, config={"batch_size": batch_size}))
        assert result.num_examples == len(losses) == sum(length - 1 for length in DATA.lengths)
        assert result.metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
        assert result.metrics["accuracy"] == pytest.approx(np.mean(hits))
    still = make_trainer(arguments=ARGUMENTS | {"learning_rate": 1e-30})
    trained = still(make_task(model, config={"max_steps": 5}))  # all 40 examples once
    assert trained.num_examples == len(losses)
    assert trained.metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_a_model_that_is_named_after_its_head_is_scored_by_the_next_token() -> None:
    trainer = make_trainer(model=language.make_gpt2)
    learner = HuggingFaceLearner(model=language.make_gpt2)
    result = trainer.evaluate(make_task(learner.initial(), config={"base_sha256": learner.base_sha256()}))
    module, hits = language.make_gpt2().eval(), []
    with torch.no_grad():
        for example in (DATA[index] for index in range(len(DATA))):
            answers = module(example["input_ids"][None], attention_mask=example["attention_mask"][None]).logits.argmax(
                2
            )
            hits += (answers[0, :-1] == example["labels"][1:])[example["labels"][1:] != -100].tolist()
    assert result.num_examples == len(hits)
    assert result.metrics["accuracy"] == pytest.approx(np.mean(hits))


def test_a_stop_ends_the_run_within_a_batch_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trainer, seen, whole = make_trainer(), [], make_task()
    expected = trainer(whole).parameters
    assert whole.control.fraction == 1.0

    class Stopping(language.Text):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            seen.append(index)
            if len(seen) == 20:
                stopped.control.expire()
            return super().__getitem__(index)

    stopped = make_task(config={"max_steps": 50})
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    object.__setattr__(trainer, "data", Stopping(40, seed=1))
    with pytest.raises(Cancelled):
        trainer(stopped)
    assert len(seen) < 40  # of 400
    assert 0.0 < stopped.control.fraction < 0.1
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before  # type: ignore[index]
    assert list(tmp_path.iterdir()) == []
    object.__setattr__(trainer, "data", DATA)
    again = trainer(make_task()).parameters
    assert isinstance(expected, Parameters)
    assert isinstance(again, Parameters)
    np.testing.assert_array_equal(again.buffer, expected.buffer)


def test_another_trainer_and_mixed_precision_serve_any_number_of_rounds() -> None:
    class Halved(transformers.Trainer):
        def compute_loss(self, *arguments: Any, **more: Any) -> Any:
            loss: Any = super().compute_loss(*arguments, **more)
            return loss / 2

    def make(model: Any, arguments: Any, data: Any, callbacks: list[Any]) -> Any:
        return Halved(model=model, args=arguments, train_dataset=data, callbacks=callbacks)

    plain, halved = make_trainer(), make_trainer(trainer=make)
    losses = [trainer(make_task(config={"learning_rate": 1e-20})).metrics["loss"] for trainer in (halved, plain)]
    assert losses[0] == pytest.approx(losses[1] / 2, rel=1e-5)
    mixed = make_trainer(arguments=ARGUMENTS | {"bf16": True})
    run_rounds(mixed, 3, 1)
    options = HuggingFaceConfig(base_sha256=BASE)
    with mixed._learner.borrow(options) as trainee:  # pyright: ignore[reportPrivateUsage]
        assert "forward" not in vars(trainee.module)  # accelerate wraps it in each run


def test_partial_work_ends_before_the_deadline() -> None:
    seconds = itertools.count()
    control = Control(training_timeout_s=100.0, options=ClientOptions(clock=lambda: float(next(seconds))))
    state = ClientState()
    task = make_task(config={"partial_work": True, "max_steps": 1000}, control=control, client_state=state)
    made = make_trainer()(task).metrics["local_steps"]
    assert 2 <= made < 50
    order = state.get("order")
    assert order is not None
    assert order["position"] == 8 * made  # the next round begins behind them


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"epochs": 1}, JobFileError, "config.max_steps = 2: expected either it or epochs, not both"),
        ({"schedule": "job"}, JobFileError, 'config.schedule = "job": the number of rounds is not known'),
        ({"batch_size": 0}, JobFileError, "config.batch_size"),
        ({"base_sha256": ""}, ModelError, f"does not state the base .*{BASE}"),
        ({"base_sha256": "0" * 64}, ModelError, "expected the same base on all participants"),
        ({"learning_rate": 1e30}, ModelError, "the training has diverged"),
    ],
)
def test_what_cannot_be_trained_is_one_sentence(config: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_trainer()(make_task(config=config))


def simulate_clients(engine: str, **config: Any) -> Any:
    tokens, labels = DATA.arrays()
    parts = [np.arange(0, 8), np.arange(8, 30)]
    held_out = [np.arange(30, 34), np.arange(34, 40)]
    federation = Federation(tokens, labels, parts, tokens[30:], labels[30:], held_out=held_out)
    more = "[evaluation.clients]\ngoal = 2\nevaluator = 'chat'\n" + "[simulation]\nseed = 5\nworkers = 2\n"
    options = {"max_steps": 3, "keep_optimizer": True, "schedule": "job", **config}
    text = write_job(rounds=3, trainer="chat", config=options, selection={"goal": 2, "min_fraction": 1.0}, more=more)
    file = parse(text, Path(), [f"simulation.engine={engine}"])
    return simulate(file, data=federation, learner=HuggingFaceLearner(model=language.make_adapted, arguments=ARGUMENTS))


def test_simulated_clients_have_state_and_weigh_their_tokens() -> None:
    check_learner(LEARNER, DATA.arrays(), {"max_steps": 2, "learning_rate": 1e-2})
    run = simulate_clients("loop")
    assert run.model is not None
    np.testing.assert_array_equal(simulate_clients("processes").model.buffer, run.model.buffer)
    assert not np.array_equal(simulate_clients("loop", keep_optimizer=False).model.buffer, run.model.buffer)
    with pytest.raises(EngineError, match='engine = "vmap": the learner is not a PyTorch module; use "loop" or'):
        simulate_clients("vmap")
    last = {each.kind: each for each in run.result.attempts}  # of each kind
    assert last["EVALUATE"].version == 3
    central = make_trainer(data=[DATA[index] for index in range(30, 40)]).evaluate(make_task(run.model))
    for metrics in (
        last["TRAIN"].evaluation,
        last["EVALUATE"].metrics,
    ):  # all tokens together, on one machine and over both clients
        for name, value in central.metrics.items():
            assert metrics[name] == pytest.approx(value, rel=1e-6)


class Unlabelled(language.Text):
    """Padding alone."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        example = super().__getitem__(index)
        return {**example, "labels": torch.full_like(example["labels"], -100)}


def refuse_model() -> Any:
    return language.with_adapters(language.make_llama(), targets=("no_such_layer",))


def make_resized() -> Any:
    model = language.make_llama()
    model.resize_token_embeddings(language.NUM_TOKENS + 1)
    return language.with_adapters(model)


def test_bad_input_is_one_sentence_and_changes_nothing() -> None:
    """The module and the task's model are compared by their bits afterwards."""
    trainer = make_trainer()
    expected = trainer(make_task()).parameters
    learner = trainer._learner  # pyright: ignore[reportPrivateUsage]
    with learner.borrow(HuggingFaceConfig(base_sha256=BASE)) as trainee:
        before = {name: value.clone() for name, value in trainee.module.state_dict().items()}
    first = next(iter(START))
    missing = Parameters.from_arrays({name: START[name] for name in START if name != first})
    rank = Parameters.from_arrays({name: START[name][:1] if "lora_A" in name else START[name][:, :1] for name in START})
    for model, message in (
        (
            missing,
            f"the job's model has no tensor '{first}', which PeftModelForCausalLM trains; expected all 8 tensors",
        ),
        (rank, r"has the shape \[1, 32\] in the job's model; PeftModelForCausalLM has the shape \[4, 32\]"),
    ):
        task = make_task(model)
        with pytest.raises(ModelError, match=message) as caught:
            trainer(task)
        assert "\n" not in str(caught.value)
        np.testing.assert_array_equal(task.parameters.buffer, model.buffer)
    with learner.borrow(HuggingFaceConfig(base_sha256=BASE)) as trainee:
        assert all(torch.equal(value, before[name]) for name, value in trainee.module.state_dict().items())
    resized = make_trainer(model=make_resized)
    with pytest.raises(ModelError, match="expected the same base on all participants"):
        resized(make_task())
    with pytest.raises(
        ModelError, match=r"the function of the model failed: Target modules .*no_such_layer.* not found"
    ):
        make_trainer(model=refuse_model)(make_task())
    with pytest.raises(DataError, match="no label of the examples counts; expected some that are not -100"):
        make_trainer(data=Unlabelled(8, seed=1))(make_task())
    again = trainer(make_task()).parameters
    assert isinstance(expected, Parameters)
    assert isinstance(again, Parameters)
    np.testing.assert_array_equal(again.buffer, expected.buffer)


def make_tokenizer(words: tuple[str, ...] = ("a", "b", "c"), **special: str) -> Any:
    vocabulary = {word: number for number, word in enumerate(("<unk>", *words))}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="<unk>", **special)


def test_a_silo_with_another_tokenizer_is_refused_before_training() -> None:
    one, other = make_tokenizer(), make_tokenizer(("a", "c", "b"))
    digest, another = tokenizer_sha256(one), tokenizer_sha256(other)
    one("a b", padding="max_length", truncation=True, max_length=1)  # a call is remembered by its object
    assert tokenizer_sha256(one) == digest == tokenizer_sha256(make_tokenizer())
    assert len({digest, another, tokenizer_sha256(make_tokenizer(eos_token="c"))}) == 3
    one.chat_template = "{{ messages }}"
    assert tokenizer_sha256(one) != digest
    pairs = {"type": "BPE", "vocab": {}, "merges": [["a", "b"]], "ignore_merges": False}
    texts = {"type": "BPE", "vocab": {}, "merges": ["a b"], "dropout": None}

    class Written:
        def __init__(self, model: dict[str, Any]) -> None:
            self.to_str = lambda: json.dumps({"version": "1.0", "model": model})

    assert tokenizer_sha256(Written(pairs)) == tokenizer_sha256(Written(texts))

    made: list[Any] = []
    trainer = make_trainer(tokenizer=make_tokenizer(), model=lambda: made.append(1))
    for stated, message in (
        (
            another,
            f'tokenizer_sha256 = "{another}": the tokenizer here has the SHA-256 {digest}; expected the same tok',
        ),
        ("", f"does not state the tokenizer .* expected tokenizer_sha256 in its .* {digest}"),
    ):
        with pytest.raises(ModelError, match=message):
            trainer(make_task(config={"tokenizer_sha256": stated}))
    assert made == []
    with pytest.raises(
        ModelError, match=r"the trainer here does not name the tokenizer of its data; expected one with tok"
    ):
        make_trainer()(make_task(config={"tokenizer_sha256": digest}))
    with pytest.raises(ModelError, match="the tokenizer is a dict; expected one of transformers or of the package"):
        make_trainer(tokenizer={})(make_task())

    def no_model() -> torch.nn.Module:
        raise AssertionError("a model was made")

    own = TorchTrainer(model=no_model, data=(np.ones(2), np.ones(2)), share="trained", tokenizer=one)
    for stated, message in ((another, "expected the same tokenizer on all"), ("", "expected tokenizer_sha256 in its")):
        task = make_task(config={"tokenizer_sha256": stated, "learning_rate": 0.1, "epochs": 1, "batch_size": 1})
        for run in (own, own.evaluate):
            with pytest.raises(ModelError, match=message):
                run(task)
    assert not made
    result = make_trainer(tokenizer=make_tokenizer())(make_task(config={"tokenizer_sha256": digest}))
    assert result.metrics["local_steps"] == 2


class Chained(torch.utils.data.ChainDataset):
    """A stream."""

    def __len__(self) -> int:
        raise TypeError("its parts have no length")


def test_unusable_data_and_models_are_named() -> None:
    with pytest.raises(DataError, match="the data Chained has no length; expected a map-style dataset, not a stream"):
        make_trainer(data=Chained([DATA]))(make_task())
    with pytest.raises(DataError, match="there are no examples"):
        make_trainer(data=language.Text(0, seed=1))(make_task())
    wrong = Parameters.from_arrays({name: START[name][:1] for name in START})
    with pytest.raises(ModelError, match=r"has the shape \[1, 32\] in the job's model; PeftModelForCausalLM has"):
        make_trainer()(make_task(wrong))


def test_the_files_of_the_page_train_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {block.marker.removeprefix("file: "): block.text for block in blocks.read("docs/language-models.md")}
    monkeypatch.chdir(tmp_path)
    Path("chat.py").write_text(files["chat.py"])
    Path("notes.txt").write_text("The patient is well, and goes home.\n" * 8 + "\nA second visit is due.\n" * 8)
    start = user_code.load("chat.py:initial", tmp_path)()
    digest = user_code.load("chat.py:LEARNER", tmp_path).base_sha256()
    job = parse_job(files["chat.toml"].replace("the digest that python chat.py prints", digest))
    client_config = {**job.client_config, "learning_rate": 1e-2}
    options = {"config": client_config, "num_rounds": job.rounds}
    model, losses = start, []
    for number in (1, 2):
        task = make_task(model, round=number, **options)
        losses.append(user_code.load("chat.py:evaluate", tmp_path)(task).metrics["loss"])
        model = user_code.load("chat.py:train", tmp_path)(task).parameters
    assert losses[1] < 0.95 * losses[0]
    Path("local.py").write_text(files["local.py"])
    same = user_code.load("local.py:LEARNER", tmp_path)
    assert (same.initial().schema, same.base_sha256()) == (start.schema, digest)
    tokens = torch.arange(32).reshape(4, 8)
    trainer = user_code.load("local.py:make_trainer", tmp_path)(tokens, tokens + 1)
    config = {"epochs": 3, "batch_size": 4, "learning_rate": 1e-2, "optimizer": "adamw", "base_sha256": digest}
    before, after = (
        trainer(Task(name="chat", parameters=each.copy(), config=config))
        for each in (start, trainer(Task(name="chat", parameters=start.copy(), config=config)).parameters)
    )
    assert after.metrics["loss"] < before.metrics["loss"]
