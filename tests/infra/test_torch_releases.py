"""`make test-torch`: what stops the test of a release is one line."""

from infra import torch_releases


def test_a_command_that_hangs_is_ended_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_releases, "_COMMAND_S", 0.1, raising=False)
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec timeout 20 tail -f /dev/null\n")
    hanging.chmod(0o755)
    as_expected, text = torch_releases.tested(str(hanging), tmp_path)
    assert not as_expected
    assert text.endswith("/python -W ignore -m tests.featurize.golden_traces did not end within 0.1 s")
