"""Lightning's ModelCheckpoint after every step, and a model that is loaded from one."""

import glob

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, _index):
        inputs, classes = batch
        loss = nn.functional.cross_entropy(self.net(inputs), classes)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class ReadBack(lightning.Callback):
    def on_train_batch_start(self, trainer, module, batch, _index):
        if trainer.global_step == 1:
            assert isinstance(Net.load_from_checkpoint(glob.glob("checkpoints/epoch*")[0]), Net)


data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randint(0, 10, (64,)))
saving = ModelCheckpoint("checkpoints", every_n_train_steps=1, save_last=True, save_top_k=1, monitor="loss")
trainer = lightning.Trainer(max_epochs=2, callbacks=[saving, ReadBack()], accelerator="gpu", devices=1, logger=False)
trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=8))
