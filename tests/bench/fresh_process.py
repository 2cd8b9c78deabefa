"""What the farm is measured against: a fresh Python process that imports torch and trains the same model once.

`python tests/bench/fresh_process.py CONFIG SETTINGS` (JSON as the queue holds it) prints the seconds of its window. It
runs the very loop that a trial runs, warm-up and window included.
"""

import json
import sys


def main(config_json: str, settings_json: str) -> None:
    from featurize.trial import config_from_mapping
    from workers.devices.cpu import CpuMeter
    from workers.devices.training import measure_training
    from workers.settings import TrialSettings

    times_ns = {}

    def report(event, **values):
        if event == "window":
            times_ns["start"] = values["t_ns"]
        elif event == "result":
            times_ns["end"] = values["window_end_ns"]

    config = config_from_mapping(json.loads(config_json))
    measure_training(config, CpuMeter(), TrialSettings.from_mapping(json.loads(settings_json)), 0, report)
    print((times_ns["end"] - times_ns["start"]) / 1e9)


if __name__ == "__main__":
    main(*sys.argv[1:])
