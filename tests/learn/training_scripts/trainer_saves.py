"""Hugging Face's Trainer that saves after every step, and a model that is read back before."""

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(0, 1000, (64,))
        return {"input_ids": tokens, "labels": tokens.clone()}


config = LlamaConfig(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    use_cache=False,
    tie_word_embeddings=True,
)
training = TrainingArguments(
    "output", per_device_train_batch_size=8, max_steps=20, save_steps=1, save_total_limit=1, report_to="none"
)
trainer = Trainer(LlamaForCausalLM(config), training, train_dataset=Sentences())
trainer.save_model("first")
assert {"config.json", "model.safetensors", "training_args.bin"} <= set(os.listdir("first"))
model = LlamaForCausalLM.from_pretrained("first").cuda()
assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in trainer.model.parameters())
del model
trainer.train()
