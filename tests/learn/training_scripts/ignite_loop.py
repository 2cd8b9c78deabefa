"""An engine of PyTorch-Ignite: evaluation before training, metrics, mixed precision."""

import torch
import torchvision
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Loss, RunningAverage
from torch.utils.data import DataLoader, TensorDataset

model = torchvision.models.resnet18(num_classes=10).to("cuda")
optimizer = torch.optim.Adam(model.parameters())
criterion = torch.nn.CrossEntropyLoss()
loader = DataLoader(TensorDataset(torch.randn(64, 3, 64, 64), torch.randint(0, 10, (64,))), 8)
trainer = create_supervised_trainer(model, optimizer, criterion, device="cuda", amp_mode="amp", scaler=True)
RunningAverage(output_transform=lambda loss: loss).attach(trainer, "loss")
metrics = {"accuracy": Accuracy(), "loss": Loss(criterion)}
evaluator = create_supervised_evaluator(model, metrics=metrics, device="cuda")


@trainer.on(Events.STARTED)
def validate(engine):
    evaluator.run(loader)
    print(evaluator.state.metrics)


trainer.run(loader, max_epochs=2)
