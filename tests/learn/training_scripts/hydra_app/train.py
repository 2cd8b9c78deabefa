"""A Hydra application whose folders are called as packages of this project, with and without `__init__.py`."""

import logging

import hydra
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from farm import schedules

log = logging.getLogger(__name__)


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    log.info(OmegaConf.to_yaml(cfg))
    model = instantiate(cfg.model).to(cfg.device)
    optimizer = instantiate(cfg.optimizer, params=model.parameters())
    scheduler = schedules.warmup(optimizer)
    while True:
        loss = model(torch.randn(cfg.batch, 64, device=cfg.device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        log.info("loss %.3f", loss.item())


if __name__ == "__main__":
    main()
