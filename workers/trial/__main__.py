"""`python -m workers.trial CONTROL`: the trial server, a server of children (`conf.children.running`) for trials."""

import sys

from conf.children.running import run_server
from workers.trial.body import prepare

if __name__ == "__main__":
    run_server(int(sys.argv[1]), "", prepare)
