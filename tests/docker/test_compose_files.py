"""The compose files, as Compose resolves them. Needs no engine, only the command."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.server_process import ROOT
from tests.docker.compose import CPU, GPU, compose, resolved
from trainer.viewer.view import build_parser

pytestmark = pytest.mark.skipif(compose() is None, reason="Docker Compose is not installed")

SERVICES = {"env", "env-public", "inference", "inference-public", "model", "trainer", "trainer-remote", "view"}
ALWAYS = {"env", "inference", "model", "trainer", "view"}


def gpus(service: dict[str, Any]) -> list[str]:
    """Return the GPUs that a service reserves."""
    devices = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    for device in devices:
        assert device["capabilities"] == ["gpu"]
        assert device["driver"] == "nvidia"
    return [number for device in devices for number in device["device_ids"]]


def words(service: dict[str, Any]) -> list[str]:
    """Return a command, word by word."""
    command = service["command"]
    return shlex.split(command) if isinstance(command, str) else list(command)


def flag(service: dict[str, Any], name: str) -> str:
    """Return the value of a command's flag."""
    found = words(service)
    return found[found.index(f"--{name}") + 1]


@pytest.mark.parametrize("files", [GPU, CPU])
def test_the_services_and_their_profiles(files: tuple[str, ...]) -> None:
    services = resolved(files)
    assert set(services) == SERVICES
    assert {name for name, service in services.items() if not service.get("profiles")} == ALWAYS


def test_one_gpu_is_shared() -> None:
    services = resolved(GPU)
    assert gpus(services["inference"]) == gpus(services["trainer"]) == ["0"]
    assert flag(services["inference"], "gpu_memory_utilization") == "0.3"
    assert not any(gpus(services[name]) for name in ("env", "env-public", "model"))


def test_two_gpus_are_one_each() -> None:
    services = resolved(GPU, INFERENCE_GPU="1", INFERENCE_GPU_SHARE="0.9")
    assert gpus(services["inference"]) == gpus(services["inference-public"]) == ["1"]
    assert gpus(services["trainer"]) == gpus(services["trainer-remote"]) == ["0"]
    assert flag(services["inference"], "gpu_memory_utilization") == "0.9"


def test_without_a_gpu_none_is_reserved() -> None:
    services = resolved(CPU)
    assert not any(gpus(service) for service in services.values())
    on_gpu = resolved(GPU)
    for name in ("inference", "inference-public", "model", "trainer", "trainer-remote", "view"):
        assert services[name]["build"]["args"]["ENGINE"] == "cpu", name
        assert (services[name]["image"], on_gpu[name]["image"]) == ("sqlenv-cpu:latest", "sqlenv:latest"), name


@pytest.mark.parametrize("files", [GPU, CPU])
def test_servers_and_trainer_agree(files: tuple[str, ...]) -> None:
    settings = {"MODEL": "some/model", "WEIGHT_SYNC": "lora", "SQLENV_DATA": "/data/shop"}
    settings |= {"SQLENV_STEP_BUDGET": "9"}
    services = resolved(files, **settings)
    trainer, inference, env = services["trainer"], services["inference"], services["env"]["environment"]
    assert flag(trainer, "model_name_or_path") == flag(inference, "model") == words(services["model"])[-1]
    assert flag(trainer, "weight_sync") == flag(inference, "weight_sync") == "lora"
    assert flag(trainer, "data") == env["SQLENV_DATA"] == "/data/shop"
    assert flag(trainer, "step_budget") == str(env["SQLENV_STEP_BUDGET"]) == "9"


def test_an_adapter_is_sent_as_one() -> None:
    """`tests/docs/test_recipes.py` puts both commands through their planning."""
    services = resolved(GPU)
    assert flag(services["trainer"], "weight_sync") == flag(services["inference"], "weight_sync") == "lora"
    config = yaml.safe_load((ROOT / flag(services["trainer"], "config")).read_text())
    assert config["use_peft"]
    assert int(flag(services["inference"], "max_lora_rank")) >= config["lora_r"]
    services = resolved(CPU)
    assert flag(services["trainer"], "weight_sync") == flag(services["inference"], "weight_sync") == "disk"


@pytest.mark.parametrize("files", [GPU, CPU])
def test_nothing_is_published_but_on_loopback(files: tuple[str, ...]) -> None:
    services = resolved(files)
    published = {name: service["ports"] for name, service in services.items() if service.get("ports")}
    assert set(published) == {"env-public", "inference-public", "view"}
    for ports in published.values():
        assert [_host(port) for port in ports] == ["127.0.0.1"]


@pytest.mark.parametrize("files", [GPU, CPU])
def test_only_the_environment_can_be_published_to_others(files: tuple[str, ...]) -> None:
    services = resolved(files, ENV_BIND="0.0.0.0", INFERENCE_BIND="0.0.0.0", BIND="0.0.0.0")
    assert [_host(port) for port in services["env-public"]["ports"]] == ["0.0.0.0"]
    assert [_host(port) for port in services["inference-public"]["ports"]] == ["127.0.0.1"]
    assert [_host(port) for port in services["view"]["ports"]] == ["127.0.0.1"]


@pytest.mark.parametrize("files", [GPU, CPU])
@pytest.mark.parametrize("name", ["trainer", "trainer-remote"])
def test_a_second_up_leaves_a_finished_run_alone_and_goes_on_with_another(
    files: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    """What the script does with each kind of run: `tests/docker/test_train_script.py`."""
    service = resolved(files, RUN="mine", TRAINER_LAUNCH="torchrun --nproc-per-node 2 -m sqlenv")[name]
    entry = service["entrypoint"]
    shell, script, folder, *launch = shlex.split(entry) if isinstance(entry, str) else entry
    assert (shell, folder, launch[0]) == ("sh", "/runs/mine", "torchrun")
    assert "--output_dir" not in words(service), "the script adds it"
    mounts = [m if isinstance(m, str) else f"{m['source']}:{m['target']}" for m in service["volumes"]]
    (source,) = (mount.split(":")[0] for mount in mounts if mount.split(":")[1] == script)
    (tmp_path / "report.html").touch()
    done = subprocess.run(["sh", ROOT / source, tmp_path, "false"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("\n")) == (0, 1)


def test_the_runs_are_shown_and_not_written() -> None:
    view = resolved(CPU)["view"]
    args = build_parser().parse_args(words(view)[1:])
    assert (words(view)[0], args.paths, args.host, args.port) == ("view", [Path("/runs")], "0.0.0.0", 8060)
    (mount,) = (each for each in view["volumes"] if "/runs" in str(each))
    assert mount.endswith(":ro") if isinstance(mount, str) else mount["read_only"]


def _host(port: str | dict[str, Any]) -> str:
    """Return the address that a port is published on, as either Compose writes it."""
    return port.rsplit(":", 2)[0] if isinstance(port, str) else str(port["host_ip"])


@pytest.mark.parametrize("files", [GPU, CPU])
def test_vllm_is_on_no_network_that_leads_out(files: tuple[str, ...]) -> None:
    services = resolved(files)
    assert set(services["inference"]["networks"]) == {"inside"}
    assert set(services["env"]["networks"]) == {"inside"}
    assert re.search(r"inside: \{ internal: true \}", (ROOT / "docker-compose.yml").read_text())


def test_a_published_environment_is_never_without_a_token() -> None:
    for settings in ({}, {"SQLENV_TOKEN": "secret"}):
        environment = resolved(GPU, **settings)["env-public"]["environment"]
        assert environment["SQLENV_TOKEN"] == settings.get("SQLENV_TOKEN", "")
        assert "SQLENV_INSECURE" not in environment


@pytest.mark.parametrize("files", [GPU, CPU])
def test_every_container_is_confined(files: tuple[str, ...]) -> None:
    for name, service in resolved(files).items():
        assert service["user"] == "1000:1000", name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True, name
        assert service["init"] is True, name
        assert service["pids_limit"], name


def test_the_example_shows_every_setting_and_its_default() -> None:
    """Whoever reads .env.example sees what can be set, and what it is otherwise."""
    used: dict[str, str] = {}
    for file in ("docker-compose.cpu.yml", *GPU):
        used.update(re.findall(r"\$\{(\w+):-([^}]*)\}", (ROOT / file).read_text()))
    example = dict(re.findall(r"^#(\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert set(example) == set(used)
    instances = {"ENV_URL", "TRAIN_FLAGS"}  # there the example is one
    assert {name for name in used if example[name] != used[name]} == instances
