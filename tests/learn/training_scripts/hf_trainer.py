"""Hugging Face's Trainer on a small Llama, with a mask and labels."""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--deepspeed")
parser.add_argument("--local_rank")
arguments = parser.parse_args()


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(0, 1000, (64,))
        return {"input_ids": tokens, "attention_mask": torch.ones(64, dtype=torch.long), "labels": tokens.clone()}


config = LlamaConfig(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    use_cache=False,
)
training = TrainingArguments(
    "output",
    per_device_train_batch_size=8,
    max_steps=20,
    logging_steps=1,
    save_steps=5,
    report_to="none",
    bf16=arguments.bf16,
    dataloader_num_workers=2,
    optim="adamw_torch",
    max_grad_norm=1.0,
    deepspeed=arguments.deepspeed,
)
trainer = Trainer(LlamaForCausalLM(config), training, train_dataset=Sentences(), eval_dataset=Sentences())
assert trainer.args.device.type == "cuda"
print(trainer.train())
