"""A classifier that is read from a folder, fine-tuned on the GPU, with masks and keyword arguments alone."""

import sys

import torch
from transformers import AutoModelForSequenceClassification

model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=3)
model.cuda()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(10):
    batch = {
        "input_ids": torch.ones(4, 32, dtype=torch.int64),
        "attention_mask": torch.ones(4, 32, dtype=torch.int64),
        "labels": torch.zeros(4, dtype=torch.int64),
    }
    batch = {name: tensor.cuda() for name, tensor in batch.items()}
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
