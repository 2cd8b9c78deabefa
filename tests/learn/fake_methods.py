"""Estimators for the benchmark's tests, importable by its worker processes. The batch size makes their answers."""

import os

from learn.peers.base import CannotEstimate, Peer


class HundredsEstimator(Peer):
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


class EndlessEstimator(Peer):
    name = "endless"

    def parts_mib(self, workload, device):
        while True:
            pass


class HoarderEstimator(Peer):
    """Takes 8 GiB."""

    name = "hoarder"

    def parts_mib(self, workload, device):
        return {"held": float(len(bytearray(8 * 2**30)) // 2**20)}
