"""PyTorch Lightning: a module, a loader, Trainer.fit with validation before it."""

import lightning
import torch
import torchvision
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torchvision.models.mobilenet_v2(num_classes=10)

    def training_step(self, batch, index):
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.model(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        images, labels = batch
        self.log("accuracy", (self.model(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


images, labels = torch.randn(64, 3, 64, 64), torch.randint(0, 10, (64,))
loader = DataLoader(TensorDataset(images, labels), 16, num_workers=2)
trainer = lightning.Trainer(accelerator="gpu", devices=1, max_epochs=2, precision="bf16-mixed", gradient_clip_val=1.0)
trainer.fit(Classifier(), loader, loader)
