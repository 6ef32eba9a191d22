"""Fine-tuning with the `Trainer` of Hugging Face's transformers (extra "huggingface").

A round is one run of the Trainer from the received weights, and all rounds of a client together are one longer run: the
order of its examples, the optimizer and the learning rate's schedule continue where the client's last round ended.
"""

from __future__ import annotations

from fedplat.pytorch.huggingface.causal_lm import causal_lm
from fedplat.pytorch.huggingface.learner import Collator, Dataset, HuggingFaceLearner, MakeTrainer
from fedplat.pytorch.huggingface.run import AfterStep, HuggingFaceConfig, Round

__all__ = [
    "AfterStep",
    "Collator",
    "Dataset",
    "HuggingFaceConfig",
    "HuggingFaceLearner",
    "MakeTrainer",
    "Round",
    "causal_lm",
]
