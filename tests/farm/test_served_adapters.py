"""Hugging Face configurations with adapters and quantized weights, as data of the service's questions.

These tests stand apart from `test_serving.py`: transformers and peft take seconds to import, and a process that tests
libraries of models has them already.
"""

from __future__ import annotations

import json

import pytest

from farm.serving.bodies import EstimateRequest, Policy, estimate_question
from farm.serving.gate import Problem
from farm.serving.traces import TraceLimits, _reply
from learn import Estimate, estimate
from tests.farm.served import SMALL_LLAMA

ADAPTER = {
    "peft_type": "LORA",
    "r": 4,
    "target_modules": ["q_proj", "v_proj"],
    "inference_mode": True,
    "base_model_name_or_path": "/etc/passwd",
    "auto_mapping": None,
    "megatron_core": "megatron.core",
}
NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "_load_in_4bit": True,
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}


def test_an_adapter_and_quantized_weights_are_data_of_a_hugging_face_configuration(folder):
    body = {
        "hf_config": {**SMALL_LLAMA, "quantization_config": NF4},
        "adapter_config": ADAPTER,
        "batch_size": 2,
        "sequence_length": 32,
        "training": {"precision": "bf16"},
    }
    question = estimate_question(EstimateRequest.model_validate(body), Policy())
    done = Estimate.from_mapping(
        _reply(json.loads(question.text), TraceLimits(str(folder.root), (), 60, 2**33))["answer"]
    )
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    kept = {name: SMALL_LLAMA[name] for name in SMALL_LLAMA if name.startswith(("hidden", "inter", "num", "vocab"))}

    def build():
        model = LlamaForCausalLM(LlamaConfig(**kept))
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

    tokens = {"input_ids": [2, 32], "labels": [2, 32]}
    own = estimate(build, tokens, input_dtype="int64", precision="bf16", quantize="nf4-dq")
    assert done.parameters == own.parameters and done.breakdown == pytest.approx(own.breakdown)


@pytest.mark.parametrize(
    ("adapter", "quantization", "words"),
    [
        ({"rank": 4}, {}, "unknown 'rank'; known: bias, exclude_modules"),
        ({"target_modules": ".*(a+)+$"}, {}, "target_modules must hold names, switches and numbers"),
        ({"auto_mapping": {"parent_library": "os"}}, {}, "auto_mapping is not followed; leave it out"),
        ({}, {"quant_method": "gptq"}, "quant_method must be bitsandbytes"),
        ({}, {"bits": 4}, "unknown 'bits'; known: load_in_4bit, load_in_8bit"),
        ({}, {"bnb_4bit_use_double_quant": "yes"}, "bnb_4bit_use_double_quant must be true or false, got 'yes'"),
        ({}, {"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules must be a list of modules' names"),
        ({}, {"llm_int8_skip_modules": 5}, "llm_int8_skip_modules must be a list of modules' names, got 5"),
    ],
)
def test_fields_of_an_adapter_that_are_no_plain_data_are_refused_by_name(adapter, quantization, words):
    body = EstimateRequest(
        hf_config={**SMALL_LLAMA, "quantization_config": {**NF4, **quantization}},
        adapter_config={**ADAPTER, **adapter},
        batch_size=1,
        sequence_length=8,
    )
    with pytest.raises(Problem) as refused:
        estimate_question(body, Policy())
    assert words in refused.value.errors[0][1]
