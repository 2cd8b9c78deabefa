"""Checks the types of all packages with mypy, as pyproject.toml says; exits with 1 where there is an error."""

import sys

from mypy import api

if __name__ == "__main__":
    output, problems, code = api.run([])
    print(output + problems, end="")
    sys.exit(code)
