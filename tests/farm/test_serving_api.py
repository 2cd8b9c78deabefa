"""The service's OpenAPI description, fuzzed by schemathesis: no failure, and no answer that it does not describe."""

from __future__ import annotations

import subprocess
import sys

from test_serving import service as service

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "negative_data_rejection",
)  # fmt: skip


def test_no_body_that_the_description_allows_or_refuses_makes_the_service_fail(service, tmp_path):
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{service.url}/openapi.json"]
    command += ["--phases", "examples,fuzzing", "--max-examples", "60", "--seed", "1", "--request-timeout", "30"]
    command += ["--checks", ",".join(CHECKS)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)  # it keeps a cache where it runs
    assert done.returncode == 0, done.stdout
