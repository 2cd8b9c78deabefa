"""`neusight`: tiles and waves, whose utilization a network learns.

Start reading at `TilesAndWaves`; `learn.fitting.formulas` has what it is compared with.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from learn.estimators.kernel_fitting import TimeFit
from learn.estimators.kernel_sizes import Instruments, ends_of, sizes_of


class TilesAndWaves:
    """NeuSight's form: a network gives the share of the roofline at which a tile is computed; waves do the rest.

    Lee, Phanishayee, Mahajan: "Forecasting GPU Performance for Deep Learning Training and Inference", ASPLOS 2025
    (arXiv 2407.13853), sections 4 and 5. A kernel takes waves x (time of a tile at one SM's share of the peak rates) /
    utilization, utilization = alpha - beta / waves. A multilayer perceptron gives alpha and beta from a tile's FLOPs,
    bytes and footprint over what one SM has; sigmoids keep the utilization between 0 and 1, so that no kernel is faster
    than the roofline. It learns by the symmetric percentage error. A step is the sum of its kernels; the host does not
    count.

    Differences: one small network with the kernel's kind as an input, where the paper trains a large one for each of
    five operators and takes the others as bound by memory. Tiles have one size for each kind of units, where the paper
    looks them up among profiled kernels. It learns from whole steps as well, which the paper does not: without them
    nothing is known of tensor cores and backward passes. What timing a single kernel adds is learned for each operator.
    """

    _EPOCHS, _ROWS, _RATE, _HIDDEN, _OF_KIND = 20, 128, 3e-3, 64, 8

    def __init__(self, fit: TimeFit, epochs: int = _EPOCHS) -> None:
        self.fit, self.epochs = fit, epochs
        sizes = sizes_of(fit.rows)
        self.ends = ends_of(fit.rows)
        self.kinds = sizes.kinds
        self.kind = torch.tensor(sizes.kind)
        waves = np.ceil(sizes.blocks / sizes.sm_count)
        of_sm = sizes.sm_count / sizes.blocks  # one tile of all, at one SM's share of the GPU
        self.waves = torch.tensor(waves, dtype=torch.float32)
        self.all_waves_ms = torch.tensor(sizes.count * waves * sizes.roofline_s * of_sm * 1e3, dtype=torch.float32)
        features = np.log(
            np.stack(
                [
                    sizes.math_s * of_sm + 1e-9,
                    sizes.memory_s * of_sm + 1e-9,
                    sizes.nbytes * of_sm / sizes.l2_bytes + 1e-9,
                    sizes.nbytes * of_sm / sizes.memory_bytes + 1e-12,
                ],
                axis=1,
            )
        )
        self.features = torch.tensor((features - features.mean(axis=0)) / (features.std(axis=0) + 1e-9)).float()
        self.instruments = Instruments(fit.rows)
        self.measured_ms = fit.measured_ms.float()

    def log_ratios(self, of: np.ndarray) -> np.ndarray:
        """As `Formula.log_ratios`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            kind = torch.nn.Embedding(self.kinds, self._OF_KIND)
            network = torch.nn.Sequential(
                torch.nn.Linear(self.features.shape[1] + self._OF_KIND, self._HIDDEN),
                torch.nn.ReLU(),
                torch.nn.Linear(self._HIDDEN, self._HIDDEN),
                torch.nn.ReLU(),
                torch.nn.Linear(self._HIDDEN, 2),
            )
        added = self.instruments.begin.clone().requires_grad_(True)
        learned = [*network.parameters(), *kind.parameters(), added]
        optimizer = torch.optim.AdamW(learned, lr=self._RATE, weight_decay=1e-4)
        weights = torch.tensor(self.fit.row_weights(of)).float()
        inside, order = np.flatnonzero(of), np.random.default_rng(0)
        batches = math.ceil(len(inside) / self._ROWS)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs * batches)
        for _ in range(self.epochs):
            for rows in np.array_split(order.permutation(inside), batches):
                optimizer.zero_grad()
                estimated, measured = self._milliseconds(network, kind, added, rows), self.measured_ms[rows]
                error = 2 * (estimated - measured).abs() / (estimated + measured)
                (weights[rows] * error).sum().mul(batches).backward()
                optimizer.step()
                schedule.step()
        with torch.no_grad():
            parts = np.array_split(np.arange(len(self.fit.rows)), max(1, len(self.fit.rows) // self._ROWS))
            estimated = torch.cat([self._milliseconds(network, kind, added, rows) for rows in parts])
            return torch.log(estimated / self.measured_ms).double().numpy()

    def _milliseconds(
        self, network: torch.nn.Module, kind: torch.nn.Module, added: torch.Tensor, rows: np.ndarray
    ) -> torch.Tensor:
        lengths = self.ends[rows + 1] - self.ends[rows]
        row = np.repeat(np.arange(len(rows)), lengths)
        at = torch.tensor(np.arange(len(row)) + np.repeat(self.ends[rows] - (np.cumsum(lengths) - lengths), lengths))
        alpha, beta = torch.sigmoid(network(torch.cat([self.features[at], kind(self.kind[at])], dim=1))).unbind(1)
        utilization = alpha - alpha * beta / self.waves[at]
        kernels_ms = self.all_waves_ms[at] / utilization.clamp(min=1e-4)
        busy_ms = torch.zeros(len(rows)).index_add(0, torch.tensor(row), kernels_ms)
        added_ms = torch.exp(added)[self.instruments.operator[rows]].float()
        return busy_ms + self.fit.one_kernel[rows] * added_ms
