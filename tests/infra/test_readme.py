"""The README: its output is made by its commands, which are the demo's, and agrees with today's simulator."""

import re
from pathlib import Path

import pytest

from featurize.device.device_spec import load_device
from featurize.timing.simulation import simulate
from featurize.trace.tracer import trace_config
from infra import generate_docs

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RUN_ID = re.compile(r"\bcnn-[0-9a-f]{8}-(\d{6})\b")
PAGE = """# A page

<!-- run: echo "a'; echo foo"; echo 20261121T172637Z-78894296; echo secret; echo secret; echo seven words
hide: ^secret
-->
old
<!-- /run -->

```python
print("from Python", 6 * 7)
```

<!-- run: the python above -->
<!-- /run -->

<!-- run: pwd; touch here -->
<!-- /run -->

<!-- run: ls -->
<!-- /run -->
"""


def test_blocks_are_replaced_by_what_their_commands_print():
    page = generate_docs.regenerated(PAGE)
    printed = ["a'; echo foo", "YYYYMMDDThhmmssZ-xxxxxxxx", "[...]", "seven words"]
    assert "".join(f"    {line}\n" for line in printed) in page and "\nold\n" not in page
    assert "\n    from Python 42\n" in page
    assert "$ ls\n    here\n" in page, "commands run one after the other in one folder"
    assert generate_docs.regenerated(page) == page


def test_a_command_that_fails_is_an_error():
    with pytest.raises(SystemExit, match=r"exit code 3:\nwhy"):
        generate_docs.regenerated("<!-- run: echo why; exit 3 -->\n<!-- /run -->\n")


def test_check_writes_nothing_and_names_the_cure(tmp_path, monkeypatch, capsys):
    page = tmp_path / "README.md"
    page.write_text("<!-- run: echo new -->\n\n    $ echo new\n    old\n\n<!-- /run -->\n")
    before = page.read_text()
    monkeypatch.setitem(generate_docs.DOCUMENTS, "readme", page)
    assert generate_docs.main(["readme", "--check"]) == 1 and page.read_text() == before
    assert "make readme" in capsys.readouterr().err
    assert generate_docs.main(["readme"]) == 0
    assert generate_docs.main(["readme", "--check"]) == 0


def test_the_readme_shows_the_commands_of_the_demo():
    script = (ROOT / "infra" / "demo.sh").read_text(encoding="utf-8")
    demo = [line.removeprefix("run ") for line in script.splitlines() if line.startswith("run python")]
    demo = [command.replace('"run=$run_id"', "run=NEWEST_RUN") for command in demo]
    assert demo == [block.command for block in generate_docs.blocks_of(README) if block.code is None]
    (query,) = re.findall(r'^sql="(.*?)"$', script, re.M | re.S)
    assert query in README


def test_the_readme_s_simulated_figures_are_those_of_this_code():
    """The run beside the estimate, simulated again: stale figures need `make readme`."""
    from featurize.configs.space import default_space, parse_space, sample

    (index,) = {int(number) for number in re.findall(rf"run={RUN_ID.pattern}", README)}
    device = load_device("A100-SXM4-40GB")
    config = sample(parse_space("cnn", default_space("cnn")), 0, index)
    step = simulate(trace_config(config, device=device), device, config)
    cells = {
        row[0]: row[2]
        for line in README.splitlines()
        if len(row := [cell.strip() for cell in line.strip().strip("│").split("│")]) == 6
    }
    assert cells["peak memory"] == f"{step.peak_memory_mib:,.0f} MiB", "make readme"
    assert cells["smact (SM activity)"] == f"{step.activity.smact:.3f}", "make readme"
    assert cells["step time"] == f"{step.step_time_ms:,.3f} ms", "make readme"
