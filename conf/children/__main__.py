"""`python conf/children/__main__.py PREPARE FOLDER_BASE CONTROL`: a server of children (`conf.children.running`).

Run as a file, to not find another `conf`. PREPARE is empty, or `module:function`.
"""

import pkgutil
import sys
from pathlib import Path

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of this file
    sys.path.insert(0, str(Path(__file__).parents[2]))

    from conf.children.running import run_server

    prepare, folder_base, control = sys.argv[1:]
    run_server(int(control), folder_base, pkgutil.resolve_name(prepare) if prepare else dict)
