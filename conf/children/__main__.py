"""`python conf/children/__main__.py FOLDER`: the keeper of one program. As a file, so that no other `conf` is found."""

import sys
from pathlib import Path

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of this file
    sys.path.insert(0, str(Path(__file__).parents[2]))

    from conf.children.keeper import main

    main()
