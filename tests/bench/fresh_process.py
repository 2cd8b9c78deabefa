"""The farm's yardstick: a fresh Python process that imports torch and trains the same model once.

`python tests/bench/fresh_process.py CONFIG SETTINGS [cpu|cuda]` (JSON as the queue holds it) prints the seconds of its
window and of its warm-up. It runs the very loop that a trial runs, both included.
"""

import json
import sys


class Link:
    """Nobody listens: the times of the window are kept, and it ends when the trial's own figures are steady."""

    together = None

    ahead = False

    def __init__(self):
        self.times_ns = {}

    def report(self, event, **values):
        if event in ("warmup", "window"):
            self.times_ns[event] = values["t_ns"]
        elif event == "result":
            self.times_ns["end"] = values["window_end_ns"]

    def received(self, word):
        return True

    def wait_for_go(self):
        return False


def main(config_json: str, settings_json: str, backend: str = "cpu") -> None:
    from featurize.configs.trial import config_from_mapping
    from workers.devices import TrialSettings
    from workers.devices.training import measure_training

    def open_meter():
        if backend == "cpu":
            from workers.devices.cpu import CpuMeter

            return CpuMeter()
        import torch

        from workers.devices.cuda import CudaMeter

        torch.cuda.init()
        return CudaMeter(torch.device("cuda", 0))

    link = Link()
    config = config_from_mapping(json.loads(config_json))
    measure_training(config, open_meter, TrialSettings(**json.loads(settings_json)), 0, link)
    warm, start, end = (link.times_ns[name] for name in ("warmup", "window", "end"))
    print((end - start) / 1e9, (start - warm) / 1e9)


if __name__ == "__main__":
    main(*sys.argv[1:])
