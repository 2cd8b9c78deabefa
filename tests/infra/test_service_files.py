"""Files around the farm agree with it: units, containers, Prometheus, Grafana, cluster files."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from conf.cli.command_line import load_config, load_settings
from conf.cli.commands import settings_class
from farm.dispatch.monitoring import FarmMetrics, Pulse
from farm.work import WorkSettings
from warehouse.files.folder import DataFolder

ROOT = Path(__file__).resolve().parents[2]
INFRA = ROOT / "infra"


def tool(name):
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    return name


def run(*command, **environment):
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env={**os.environ, **environment}
    )


# The night


@pytest.fixture
def root(tmp_path):
    """A checkout with a Python of its own, as far as the scripts look at it."""
    made = tmp_path / "checkout"
    (made / ".venv" / "bin").mkdir(parents=True)
    (made / ".venv" / "bin" / "python").symlink_to(shutil.which("true"))
    shutil.copytree(INFRA / "systemd", made / "infra" / "systemd")
    shutil.copy(INFRA / "nightly.sh", made / "infra" / "nightly.sh")
    return made


def install(root, tmp_path, *arguments):
    units = tmp_path / "units"
    return units, run(root / "infra/systemd/install.sh", f"units={units}", "user=root", *arguments)


@pytest.mark.parametrize(("work", "serve", "count"), [("yes", "no", 3), ("no", "no", 2), ("yes", "yes", 4)])
def test_the_installed_units_are_good_to_systemd(root, tmp_path, work, serve, count):
    tool("systemd-analyze")
    units, done = install(root, tmp_path, f"data={tmp_path}/data", f"work={work}", f"serve={serve}")
    assert done.returncode == 0, done.stderr
    files = sorted(units.iterdir())
    assert len(files) == count
    assert not [file for file in files if re.search(r"@[A-Z]+@", file.read_text())]
    assert work == "yes" or "gpufarm-work" not in "".join(file.read_text() for file in files)
    checked = run("systemd-analyze", "verify", *files)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "which data folder"), (("data=/tmp/x y",), "unit files cannot hold this path"), (("daat=/tmp",), "unknown")],
)
def test_a_mistaken_installation_is_told(root, tmp_path, arguments, message):
    _, done = install(root, tmp_path, *arguments)
    assert done.returncode == 2 and message in done.stderr


def test_the_service_starts_a_command_that_exists(root, tmp_path):
    units, _ = install(root, tmp_path, f"data={tmp_path}/data", "serve=yes")

    def words(name, key):
        return re.search(rf"^{key}=(.*)$", (units / f"gpufarm-{name}.service").read_text(), re.MULTILINE)[1].split()

    settings = {}
    for name in ("work", "serve"):
        _, option, module, *arguments, last = words(name, "ExecStart")
        assert (option, module, last) == ("-m", f"farm.{name}", f"$GPUFARM_{name.upper()}_ARGS")
        settings[name] = load_config(settings_class(name), arguments)
    assert settings["work"].wait and settings["work"].metrics.port == 9108
    assert settings["serve"].data == f"{tmp_path}/data"
    assert load_config(settings_class("grow"), words("grow", "Environment=GPUFARM_GROW_ARGS")).n == 500


def test_a_night_is_one_growth_cycle_whose_exit_code_is_the_nights(tmp_path):
    """75 is that of a cycle beside another one, see `test_grow.py`."""
    data = tmp_path / "a'; echo foo"
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$@" "$GPUFARM_DATA" $$\nexit 75\n')
    fake.chmod(0o755)
    environment = {**os.environ, "GPUFARM_DATA": str(data), "GPUFARM_PYTHON": str(fake)}
    night = subprocess.Popen([INFRA / "nightly.sh", "n=7"], stdout=subprocess.PIPE, text=True, env=environment)
    # The very process that systemd asks to leave
    assert night.communicate()[0] == f"-m farm.grow n=7 {data} {night.pid}\n" and night.returncode == 75


# What watches it


def metric_names(tmp_path):
    metrics = FarmMetrics(DataFolder.resolve(tmp_path / "data").create().queue, Pulse())
    metrics.on_event({"event": "landed", "run": "r", "family": "cnn", "status": "ok", "wall_s": 1.0})
    return {
        f"{family.name}_total" if family.type == "counter" else family.name for family in metrics.registry.collect()
    }


def service_metric_names():
    """Return the names in `/metrics` of a service that has answered something."""
    answered = """
from farm.serving.gate import ServiceMetrics
metrics = ServiceMetrics()
metrics.request("/v1/estimate", "POST", 200, 0.01)
metrics.answered("fast")
print(metrics.text({"queued": 1}, 1.0).decode())
"""
    with tempfile.TemporaryDirectory() as folder:
        done = run(sys.executable, "-c", answered, PROMETHEUS_MULTIPROC_DIR=folder)
    return set(re.findall(r"^(gpufarm_\w+)", done.stdout, re.MULTILINE))


def expressions():
    dashboard = json.loads((INFRA / "grafana/dashboards/gpufarm.json").read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for group in yaml.safe_load((INFRA / "prometheus/rules.yml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def test_dashboard_and_alerts_ask_only_for_metrics_that_are_served(tmp_path):
    served = metric_names(tmp_path) | service_metric_names()
    fields = {line.split(",")[0] for line in (INFRA / "dcgm-exporter/counters.csv").read_text().splitlines()}
    asked = set(re.findall(r"\b(?:gpufarm|DCGM)_\w+", "\n".join(expressions())))
    assert asked and not {name for name in asked if name not in served | fields}


@pytest.mark.parametrize("words", [("check", "config", "prometheus.yml"), ("test", "rules", "rules.test.yml")])
def test_prometheus_takes_the_configuration_and_the_alerts_fire_when_they_should(words):
    *command, file = words
    done = run(tool("promtool"), *command, INFRA / "prometheus" / file)
    assert done.returncode == 0, done.stdout + done.stderr


# Containers and clusters


def test_the_services_reach_each_other_where_they_listen():
    names = ("container/compose", "container/compose.gpu", "container/compose.serve")
    compose, overlay, serve = (yaml.safe_load((INFRA / f"{name}.yaml").read_text()) for name in names)
    services = {**overlay["services"], **serve["services"], **compose["services"]}
    scraped = yaml.safe_load((INFRA / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    targets = [target for job in scraped for config in job["static_configs"] for target in config["targets"]]
    assert {target.partition(":")[0] for target in targets} <= set(services)
    assert "metrics.port=9108" in (INFRA / "container/start.sh").read_text()
    command = serve["services"]["serve"]["command"]
    assert command[:3] == ["python", "-m", "farm.serve"]
    settings = load_config(settings_class("serve"), command[3:])
    assert settings.port == 8350 and set(serve["secrets"]) == {settings.token_file.removeprefix("/run/secrets/")}
    published = [
        port for service in [*compose["services"].values(), *serve["services"].values()] for port in service["ports"]
    ]
    assert published and all(port.startswith("127.0.0.1:") for port in published)


def test_the_image_copies_folders_that_exist_and_starts_a_command_that_exists():
    text = (INFRA / "container/Dockerfile").read_text()
    copied = [line.split()[:-1] for line in re.findall(r"^COPY --chown=farm (.*)$", text, re.MULTILINE)]
    assert [name for names in copied for name in names if not (ROOT / name).exists()] == []
    command = re.search(r"^exec python -m farm.work (.*) \"\$@\"$", (INFRA / "container/start.sh").read_text(), re.M)
    settings = load_settings(WorkSettings, command[1].split())
    assert (settings.log.format, settings.metrics.address) == ("json", "0.0.0.0")


@pytest.mark.parametrize(("arguments", "word"), [((), "node.sh"), (("worker",), "node.sh"), (("head",), "token")])
def test_a_node_is_not_started_without_being_told_what_it_is_and_a_token(tmp_path, arguments, word):
    done = run(INFRA / "cluster/node.sh", *arguments, HOME=str(tmp_path), RAY_AUTH_TOKEN="")
    assert done.returncode == 2 and word in done.stderr


@pytest.mark.parametrize("script", sorted(INFRA.rglob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_good_to_shellcheck(script):
    checked = run(tool("shellcheck"), script)
    assert checked.returncode == 0, checked.stdout
