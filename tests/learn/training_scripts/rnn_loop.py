"""A language model of an LSTM with truncated backpropagation: the hidden state is carried from batch to batch."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(1000, 256)
        self.rnn = nn.LSTM(256, 256, 2, dropout=0.2, batch_first=True)
        self.decoder = nn.Linear(256, 1000)

    def forward(self, tokens, hidden=None):
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return self.decoder(self.drop(output)), hidden


model = Model().cuda()
tokens = torch.randint(0, 1000, (16, 64 * 20)).cuda()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
total, hidden = 0.0, None
for at in range(0, tokens.size(1) - 64, 64):
    data, targets = tokens[:, at : at + 64], tokens[:, at + 1 : at + 65]
    if hidden is not None:
        hidden = tuple(h.detach() for h in hidden)
    optimizer.zero_grad()
    output, hidden = model(data, hidden)
    loss = criterion(output.reshape(-1, 1000), targets.reshape(-1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    total += loss.item()
    print(at, total, torch.cuda.memory_summary())
