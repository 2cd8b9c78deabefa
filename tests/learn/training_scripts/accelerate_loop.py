"""A plain accelerate loop: prepare, accumulate, clip, step."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=1)
config = BertConfig(
    vocab_size=2000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, num_labels=3
)
model = BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
tokens, labels = torch.randint(0, 2000, (64, 64)), torch.randint(0, 3, (64,))
loader = DataLoader(TensorDataset(tokens, labels), 8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()
for _epoch in range(10):
    for tokens, labels in loader:
        with accelerator.accumulate(model):
            output = model(input_ids=tokens, labels=labels)
            accelerator.backward(output.loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(output.loss.item())
    accelerator.save_state("state")
