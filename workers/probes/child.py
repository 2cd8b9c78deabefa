"""The program of one measurement's process: calls the function that the request names, and writes its rows.

Start reading at `main`. `workers.probes.children` starts it.
"""

import json
import pkgutil
import sys
from pathlib import Path


def main(request_path: str) -> None:
    """Measure what the request says. Its rows stand in the file as they come."""
    request = json.loads(Path(request_path).read_text())
    measured = pkgutil.resolve_name(request["function"])
    with open(request["rows"], "w") as rows:
        for row in measured(request["device_uuid"], **request["arguments"]):
            rows.write(json.dumps(row) + "\n")
            rows.flush()


if __name__ == "__main__":
    main(sys.argv[1])
