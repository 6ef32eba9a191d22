"""`fedplat model export --format peft|merged`: folders that transformers and peft read in a process without fedplat."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")
import peft
import torch
import transformers

from fedplat.aggregate import Flora
from fedplat.errors import FedplatError
from fedplat.model import Parameters
from fedplat.pytorch.huggingface import export
from fedplat.pytorch.training import Learner
from support import language
from support.cli.commands import Run, parsed
from support.cli.fake_state import State

pytestmark = pytest.mark.slow  # the imports alone take 10 seconds
TOKENS = list(range(3, 19))
READER = """
import json, sys
sys.modules["fedplat"] = None
import numpy, torch
for folder in sys.argv[2:]:
    if folder.endswith("peft"):
        from peft import AutoPeftModelForCausalLM as Loader
    else:
        from transformers import AutoModelForCausalLM as Loader
    model = Loader.from_pretrained(folder).eval()
    tokens = torch.tensor([json.loads(sys.argv[1])])
    with torch.no_grad():
        logits = model(input_ids=tokens).logits.numpy()
        text = model.generate(input_ids=tokens, max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
    numpy.savez(folder + ".npz", logits=logits, text=text.numpy())
"""
FILES = """
from support import language

def make_llama():
    return language.make_adapted()

def make_gpt2():
    return language.with_adapters(language.make_gpt2(), ("c_attn", "c_proj"))
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("chat.py").write_text(FILES)
    return tmp_path


def make_gpt2() -> Any:
    return language.with_adapters(language.make_gpt2(), ("c_attn", "c_proj"))


def train(make: Any, path: str = "", seed: int = 1) -> Parameters:
    """Return a model with other values than the initial ones, and write it to a file."""
    start, rng = Learner(model=make, share="trained").initial(), np.random.default_rng(seed)
    values = {
        name: (start[name] + 0.3 * rng.normal(size=start[name].shape)).astype(start[name].dtype) for name in start
    }
    parameters = Parameters.from_arrays(values)
    if path:
        Path(path).write_bytes(parameters.to_bytes())
    return parameters


def load(make: Any, parameters: Parameters) -> Any:
    module = make()
    module.load_state_dict({name: torch.from_numpy(parameters[name].copy()) for name in parameters}, strict=False)
    return module.eval()


def save_base(make: Any, folder: str) -> Path:
    """Save a base with a tokenizer of bytes, as a user has one."""
    make().save_pretrained(folder)
    transformers.ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    return Path(folder)


def test_both_formats_load_without_fedplat(run: Run, here: Path) -> None:
    """Adapters and merged weights, of layers that store their weights transposed or not, and of tied embeddings."""
    made = {"llama": language.make_adapted, "gpt2": make_gpt2}
    bases = {"llama": language.make_llama, "gpt2": language.make_gpt2}
    trained = {name: train(make, f"{name}.safetensors") for name, make in made.items()}
    for name in made:
        save_base(bases[name], f"{name}-base")
        for form in ("peft", "merged"):
            common = ["--format", form, "--model", f"chat.py:make_{name}", "--base", f"{name}-base"]
            done = run("model", "export", f"{name}.safetensors", "--to", f"{name}-{form}", *common)
            assert done.exit_code == 0, done.output
            assert done.stderr == ""
            pretrained = f"{name}-base,peft={name}-peft" if form == "peft" else f"{name}-merged"
            assert f"  lm_eval --model hf --model_args pretrained={pretrained} --tasks hellaswag" in done.stdout
    folders = [f"{name}-{form}" for name in made for form in ("peft", "merged")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "http_proxy": "http://127.0.0.1:9", "PYTHONPATH": ""}
    subprocess.run([sys.executable, "-c", READER, json.dumps(TOKENS), *folders], check=True, env=environment)
    for folder in folders:
        name = folder.partition("-")[0]
        model, tokens = load(made[name], trained[name]), torch.tensor([TOKENS])
        with torch.no_grad():
            logits = model(input_ids=tokens).logits.numpy()
            plain = bases[name]()(input_ids=tokens).logits.numpy()
            options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            text = model.generate(input_ids=tokens, max_new_tokens=32, **options).numpy()
        found = np.load(f"{folder}.npz")
        assert np.abs(plain - logits).max() > 0.1  # the adapters matter
        assert np.abs(found["logits"] - logits).max() <= 1e-5
        np.testing.assert_array_equal(found["text"], text)
    config = json.loads((here / "llama-peft/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 8, "CAUSAL_LM")
    assert sorted(config["target_modules"]) == ["q_proj", "v_proj"]
    assert config["base_model_name_or_path"] == str(here / "llama-base")
    names = Parameters.open(here / "llama-peft/adapter_model.safetensors")
    assert sorted(name.replace(".weight", ".default.weight") for name in names) == sorted(trained["llama"])
    sizes = [(here / folder / "model.safetensors").stat().st_size for folder in ("gpt2-base", "gpt2-merged")]
    assert sizes[0] == sizes[1]  # tied weights are there once
    assert {path.name for path in (here / "gpt2-merged").iterdir()} == {
        path.name for path in (here / "gpt2-base").iterdir()
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in (here / "gpt2-merged").iterdir()} == {0o600}
    assert [path.name for path in here.iterdir() if path.name.startswith(".fedplat")] == []


def test_the_model_of_a_job_and_of_a_run_folder_belong_to_their_base(run: Run, state: State, here: Path) -> None:
    trained = train(language.make_adapted)
    digest = Learner(model=language.make_adapted, share="trained").base_sha256()
    job = state.add_job("chat")
    state.add_version(b"old", 0)
    job.model.CopyFrom(state.add_version(trained.to_bytes(), 1).model)
    (here / "runs/chat").mkdir(parents=True)
    (here / "runs/chat/model.safetensors").write_bytes(trained.to_bytes())
    adapter = here / "adapter_config.json"
    peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]).save_pretrained(str(here))
    save_base(language.make_llama, "base")
    for number, stated in enumerate((digest, "0" * 64)):
        table = (
            f'name = "chat"\npopulation = "demo"\ntrainer = "chat"\nrounds = 3\n[config]\nbase_sha256 = "{stated}"\n'
        )
        job.job_file = table + '[model]\ninitial = "chat.py:initial"\n[selection]\ngoal = 2\n'
        (here / "runs/chat/run.json").write_text(json.dumps({"simulation": {"config": {"base_sha256": stated}}}))
        for place in ("chat", "runs/chat"):
            folder = f"{place.replace('/', '-')}-{number}"
            options = "--format", "peft", "--base", "base", "--adapter", str(adapter)
            done = run("model", "export", place, "--to", folder, *options)
            if stated == digest:
                assert done.exit_code == 0, done.output
                named = "version 1 of chat" if place == "chat" else "the model of runs/chat"
                assert done.stdout.startswith(f"wrote {named} as adapters of the base base (8 tensors, ")
            else:
                assert done.exit_code == 1
                assert "the base here, all tensors that are not trained, has the SHA-256" in done.stderr
                assert not (here / folder).exists()
    (here / "runs/chat/run.json").write_text(json.dumps({"simulation": {"config": {}}}))  # stated by none
    record = parsed(
        run(
            *("model", "export", "runs/chat", "--to", "whole", "--format", "merged", "--json"),
            *("--model", "chat.py:make_llama"),
        )
    )
    files = list((here / "whole").iterdir())
    assert record == {
        "folder": "whole",
        "form": "merged",
        "base": None,
        "num_tensors": 21,
        "size_bytes": sum(path.stat().st_size for path in files),
        "model_class": "LlamaForCausalLM",
        "is_causal": True,
        "has_tokenizer": False,
    }


def test_a_weight_is_added_up_in_float32_and_rounded_once() -> None:
    """In bfloat16, where most of a small term would be lost in a sum of rounded parts."""

    def make() -> Any:
        return language.with_adapters(language.make_llama().bfloat16(), ("o_proj",))

    trained, rng = train(make), np.random.default_rng(3)
    layer = "base_model.model.model.layers.1.self_attn.o_proj"
    first, second = (trained[f"{layer}.lora_{name}.default.weight"].astype(np.float64) for name in "AB")
    weight = make().state_dict()[f"{layer}.base_layer.weight"].double().numpy()
    term = (weight * 1e-3 * rng.normal(size=weight.shape)).astype(np.float32)
    expected = torch.from_numpy(weight + 2.0 * (second @ first + term)).float().bfloat16()
    model = Flora(scaling=2.0).build().requirements.extend(trained)
    own, terms = export.split_terms(model)
    assert (own, dict(terms)) == (trained, {})  # the first model of a job
    names = [
        f"server/base_model.model.model.layers.{number}.self_attn.o_proj.lora_BA.default.weight" for number in (0, 1)
    ]
    assert set(names) < set(model)
    values = {**{each: model[each] for each in model}, names[1]: term}
    own, terms = export.split_terms(Parameters.from_arrays(values))
    assert (own, list(terms)) == (trained, [layer])
    merged = export.merge(load(make, own), terms)
    torch.testing.assert_close(merged.model.layers[1].self_attn.o_proj.weight, expected, rtol=0, atol=0)
    base = save_base(language.make_llama, "base")
    with pytest.raises(FedplatError, match=r"has added a term to the weight of .*expected the format merged"):
        export.export(make, Parameters.from_arrays(values), Path("out"), "peft", base)
    other = {**values, "server/lora_scaling": np.ones(1, np.float32)}
    with pytest.raises(FedplatError, match=r"has the scaling 2.0, and the job states 1 "):
        export.export(make, Parameters.from_arrays(other), Path("out"), "merged", base)
    with pytest.raises(FedplatError, match=r"the server has added a term to 'nowhere', and the model has no adapters"):
        export.merge(load(make, own), {"nowhere": term})
    with pytest.raises(FedplatError, match=r"has the shape \[2, 32\]; expected \[32, 32\]"):
        export.merge(load(make, own), {layer: term[:2]})


def make_frozen_a() -> Any:
    """FFA-LoRA, whose first factors belong to the base."""
    model = language.make_adapted()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    return model


def make_with_norm() -> Any:
    model = language.make_adapted()
    model.base_model.model.model.norm.weight.requires_grad_(True)
    return model


def make_other() -> Any:
    return language.with_adapters(language.make_llama(seed=1))


def make_tied_head() -> Any:
    return language.with_adapters(language.make_gpt2(), ("lm_head",))


def test_models_that_are_not_plain_adapters(here: Path) -> None:
    base = save_base(language.make_llama, "base")
    ffa = train(make_frozen_a)
    assert export.export(make_frozen_a, ffa, here / "ffa", "peft", base).num_tensors == 8
    plain = train(language.make_llama)  # full fine-tuning
    export.export(language.make_llama, plain, here / "full", "merged", base)
    read = transformers.LlamaForCausalLM.from_pretrained("full").state_dict()
    np.testing.assert_array_equal(read["model.norm.weight"].numpy(), plain["model.norm.weight"])
    whole = Learner(model=language.make_adapted).initial()  # share = "all"
    assert export.export(language.make_adapted, whole, here / "all", "peft", base).num_tensors == 8


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")  # of peft
def test_what_cannot_be_exported_is_one_sentence_and_leaves_nothing(here: Path) -> None:
    base = save_base(language.make_llama, "base")
    trained = train(language.make_adapted)
    first, *rest = list(trained)
    wrong_rank = Parameters.from_arrays(
        {name: trained[name][:2] if "lora_A" in name else trained[name] for name in trained}
    )
    bad = Parameters.from_arrays({name: trained[name] * np.float32(np.nan) for name in trained})
    lone = Parameters.from_arrays({name: trained[name] for name in rest})
    nothing = export.FromFiles(base, here / "odd.json")
    (here / "odd.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "target_modules": ["query"]}))
    cases: list[tuple[Any, Parameters, str, Path | None, str]] = [
        (language.make_adapted, lone, "peft", base, f"the job's model has no tensor '{first}'"),
        (language.make_adapted, wrong_rank, "merged", base, r"has the shape \[2, 32\] in the job's model; Peft"),
        (language.make_adapted, bad, "peft", base, "the model holds NaN or infinite values"),
        (language.make_adapted, trained, "peft", None, "the model was not loaded from a folder"),
        (
            language.make_adapted,
            trained,
            "peft",
            here,
            "the base .* has no config.json; expected the folder of a model",
        ),
        (make_other, trained, "peft", base, "is another one than that of the model: the tensor .*embed_tokens"),
        (
            make_with_norm,
            train(make_with_norm),
            "peft",
            base,
            "norm.weight' was trained, but it is not of the adapters",
        ),
        (make_tied_head, train(make_tied_head), "merged", None, "has adapters, and is the weight of another layer"),
        (language.make_llama, train(language.make_llama), "peft", base, "LlamaForCausalLM without adapters; expected"),
        (
            lambda: torch.nn.Linear(2, 2),
            trained,
            "merged",
            None,
            "the model is a Linear; expected a model of transformers",
        ),
        (nothing, trained, "peft", base, "do not fit the base .*query.* not found in the base model"),
        (export.FromFiles(base, here / "none.json"), trained, "peft", base, "none.json cannot be read: No such file"),
        (export.FromFiles(base, here / "chat.py"), trained, "peft", base, "chat.py cannot be read: Expecting value"),
    ]
    before = sorted(here.iterdir())
    for make, parameters, form, folder, message in cases:
        with pytest.raises(FedplatError, match=message) as caught:
            export.export(make, parameters, here / "out", "peft" if form == "peft" else "merged", folder)
        assert "\n" not in str(caught.value)
        assert sorted(here.iterdir()) == before
    for target, message in (
        (base, "is not empty"),
        (here / "chat.py", "is a file"),
        (here / "no/where", "cannot be made"),
    ):
        with pytest.raises(FedplatError, match=message):
            export.export(language.make_adapted, trained, target, "peft", base)
    for text, message in (("{", "config.json cannot be read"), ("{}", "config.json has no model_type")):
        (base / "config.json").write_text(text)
        with pytest.raises(FedplatError, match=message):
            export.export(language.make_adapted, trained, here / "out", "peft", base)
        assert sorted(here.iterdir()) == before
