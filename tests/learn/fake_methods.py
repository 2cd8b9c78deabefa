"""Methods for the benchmark's tests, importable by its worker processes. Their answers hang on the batch size only."""

import os

from learn.analytical.base import AnalyticalEstimator, CannotEstimate


class Hundreds:
    """100 MiB a sample, refusing batches of 3, failing at 5, taking its process down at 7."""

    name = "hundreds"

    def parts_mib(self, workload, device):
        if workload.batch_size == 3:
            raise CannotEstimate("three is a crowd")
        if workload.batch_size == 5:
            raise ZeroDivisionError("five")
        if workload.batch_size == 7 and os.environ.get("HUNDREDS_DIES"):
            os._exit(9)
        return {"samples": 100.0 * workload.batch_size}


class HundredsEstimator(AnalyticalEstimator):
    name = Hundreds.name
    method = Hundreds


class Endless:
    name = "endless"

    def parts_mib(self, workload, device):
        while True:
            pass


class EndlessEstimator(AnalyticalEstimator):
    name = Endless.name
    method = Endless


class Hoarder:
    """Takes 8 GiB."""

    name = "hoarder"

    def parts_mib(self, workload, device):
        return {"held": float(len(bytearray(8 * 2**30)) // 2**20)}


class HoarderEstimator(AnalyticalEstimator):
    name = Hoarder.name
    method = Hoarder
