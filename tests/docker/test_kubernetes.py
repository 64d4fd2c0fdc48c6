"""docker/kubernetes/: what kustomize builds is valid, and every flag, port, path, name and number in it is real."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from torch.distributed.run import parse_args as parse_torchrun

from benchmarks.server_process import ROOT
from env_server.service import http
from env_server.service.serve import CLOSE_S
from env_server.service.settings import ServiceSettings, read_settings
from inference.launch.launcher import read_arguments
from inference.launch.supervisor import GRACE_S
from tests.docker.kubernetes import (
    FOLDER,
    NAMESPACE,
    Object,
    build,
    command,
    containers,
    every,
    manifests,
    needs_kubectl,
    pod_templates,
    the,
    variables,
)

pytestmark = needs_kubectl

SUPPORTED = ("1.30", "1.37")
"""Kubernetes: the oldest with everything that is used here, and the newest whose schemas there are."""
COMPONENT = "app.kubernetes.io/component"
PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")


def container_of(objects: tuple[Object, ...], workload: str) -> Object:
    (container,) = pod_templates(objects)[workload]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


@pytest.mark.parametrize("version", SUPPORTED)
def test_every_object_is_valid_and_in_the_namespace(version: str) -> None:
    """By the schemas of Kubernetes' API, which know every field."""
    for each in manifests():
        kubernetes_validate.validate(each, version, strict=True)
        assert each["kind"] == "Namespace" or each["metadata"]["namespace"] == NAMESPACE
    job = json.loads(json.dumps(the(manifests(), "Job", "trainer")))
    job["spec"]["template"]["spec"]["restartpolicy"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError, match="restartpolicy"):
        kubernetes_validate.validate(job, version, strict=True)


def test_every_pod_keeps_the_restricted_standard() -> None:
    """Of Pod Security, which the namespace enforces; and the file system is read-only."""
    labels = the(manifests(), "Namespace", NAMESPACE)["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    for template, container in containers(manifests()):
        pod, own = template["spec"], container["securityContext"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert own["readOnlyRootFilesystem"] is True
        assert pod["automountServiceAccountToken"] is False


def test_who_asks_for_a_gpu_may_run_where_gpus_are() -> None:
    for workload, template in pod_templates(manifests()).items():
        container = container_of(manifests(), workload)
        gpus = container["resources"]["limits"].get("nvidia.com/gpu")
        assert (gpus, bool(template["spec"].get("tolerations"))) == (
            (None, False) if workload == "env" else ("1", True)
        )
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]


def test_what_the_image_writes_to_can_be_written() -> None:
    """The folders that a Dockerfile names in variables, as the container has them."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for _, container in containers(manifests()):
        image, _, tag = container["image"].partition(":")
        assert tag == version
        file = {"sqlenv-env": "env", "sqlenv": "sqlenv"}[image]
        text = (ROOT / "docker" / f"{file}.Dockerfile").read_text(encoding="utf-8")
        last = re.sub(r"\\\n\s*", " ", re.split(r"^FROM ", text, flags=re.MULTILINE)[-1])
        folders = dict(re.findall(r"\b([A-Z][A-Z_]+)=(/[\w/]+)", " ".join(re.findall(r"^ENV (.*)$", last, re.M))))
        folders |= {name: each for name, each in variables(manifests(), container).items() if name in folders}
        writable = [each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")]
        if container["name"] != "wait-for-servers":
            assert "/tmp" in writable
            for name in {*folders} - {"PATH"} - ({"TRACKIO_DIR"} if container["name"] == "inference" else set()):
                assert any(f"{folders[name]}/".startswith(f"{mount}/") for mount in writable), name


def test_secrets_are_referred_to_and_never_in_the_manifests() -> None:
    assert not every(manifests(), "Secret")
    asked: dict[str, bool] = {}
    for _, container in containers(manifests()):
        for each in container.get("env", ()):
            if "valueFrom" in each:
                secret = each["valueFrom"]["secretKeyRef"]
                assert secret["name"] == "sqlenv"
                asked[secret["key"]] = secret.get("optional", False)
            else:
                assert not re.search("TOKEN|KEY", each["name"])
    assert asked == {"env-token": False, "hf-token": True, "wandb-api-key": True}


def test_selectors_services_and_volumes_mean_what_is_there() -> None:
    objects = manifests()
    templates = pod_templates(objects)
    for name, template in templates.items():
        assert template["metadata"]["labels"][COMPONENT] == name
    for each in (*every(objects, "Deployment"), *every(objects, "StatefulSet")):
        assert each["spec"]["selector"]["matchLabels"][COMPONENT] == each["metadata"]["name"]
    for service in every(objects, "Service"):
        name, spec = service["metadata"]["name"], service["spec"]
        assert spec["selector"][COMPONENT] == name
        assert spec["clusterIP"] == "None", "each server has an address of its own behind the name"
        assert [port["port"] for port in spec["ports"]] == [
            port["containerPort"] for port in container_of(objects, name)["ports"]
        ]
    for template in templates.values():
        for each in template["spec"]["volumes"]:
            if "persistentVolumeClaim" in each:
                the(objects, "PersistentVolumeClaim", each["persistentVolumeClaim"]["claimName"])


def test_nobody_but_the_trainer_reaches_the_servers() -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in every(manifests(), "NetworkPolicy")}
    assert policies["nothing-else"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    trainer = {"podSelector": {"matchLabels": {COMPONENT: "trainer"}}}
    for name in ("env", "inference"):
        assert policies[name]["ingress"] == [{"from": [trainer], "ports": [{"protocol": "TCP", "port": 8000}]}]
    assert "egress" not in policies["env"], "which runs SQL that a model wrote"


def test_the_environment_servers_take_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variable is one, and with the image's own they make a server that others reach, with a token."""
    container = container_of(manifests(), "env")
    own = variables(manifests(), container)
    assert {name.removeprefix("SQLENV_").lower() for name in own} <= set(ServiceSettings.model_fields)
    text = (ROOT / "docker" / "env.Dockerfile").read_text(encoding="utf-8")
    for name, value in (dict(re.findall(r"\b(SQLENV_\w+)=(\S+)", text)) | own).items():
        monkeypatch.setenv(name, value)
    program, *flags = command(manifests(), container)
    settings, _ = read_settings(flags)
    assert (program, settings.host, settings.port) == ("serve", "0.0.0.0", container["ports"][0]["containerPort"])
    assert settings.token is not None
    assert not settings.insecure


def test_a_stop_is_given_the_time_that_it_takes() -> None:
    templates = pod_templates(manifests())
    env = container_of(manifests(), "env")
    sleep = env["lifecycle"]["preStop"]["sleep"]["seconds"]
    longest = sleep + float(variables(manifests(), env)["SQLENV_GRACE_S"]) + 3 * CLOSE_S
    assert templates["env"]["spec"]["terminationGracePeriodSeconds"] > longest
    assert templates["inference"]["spec"]["terminationGracePeriodSeconds"] > GRACE_S


def test_the_probes_ask_what_is_answered() -> None:
    """Without a token, which no probe has."""

    async def refuse() -> None:
        raise AssertionError("asked for the token")

    routes = http.router(None, refuse, dict, {}, bytes, None)  # type: ignore[arg-type]  # nothing is called
    free = {route.path for route in routes.routes if not route.dependencies}  # type: ignore[attr-defined]
    assert free == {"/health"}
    allowed_s = {}
    for workload in ("env", "inference"):
        container = container_of(manifests(), workload)
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[kind]["httpGet"] == {"path": "/health", "port": container["ports"][0]["name"]}
        allowed_s[workload] = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
    _, options = read_arguments(command(manifests(), container_of(manifests(), "inference"))[1:])
    assert allowed_s["env"] == 120, "as in its Dockerfile"
    assert allowed_s["inference"] > options.startup_timeout_s


def test_the_trainer_and_the_servers_agree() -> None:
    """`tests/docs/test_recipes.py` plans both."""
    objects = manifests()
    words = command(objects, container_of(objects, "trainer"))
    inference, _ = read_arguments(command(objects, container_of(objects, "inference"))[1:])

    def flag(name: str) -> str:
        return words[words.index(f"--{name}") + 1]

    assert flag("model_name_or_path") == inference.model
    assert flag("weight_sync") == inference.weight_sync
    env = variables(objects, container_of(objects, "env"))
    assert flag("data") == env["SQLENV_DATA"]
    assert flag("answer_mode") == env["SQLENV_ANSWER_MODE"]
    assert flag("step_budget") == env["SQLENV_STEP_BUDGET"]
    assert flag("env") == f"ws://{the(objects, 'Service', 'env')['metadata']['name']}:8000"
    stateful = the(objects, "StatefulSet", "inference")["spec"]
    urls = [f"http://inference-{index}.{stateful['serviceName']}:8000" for index in range(stateful["replicas"])]
    assert flag("vllm_server_base_url").split(",") == urls


def test_the_folder_that_the_page_shows_builds(tmp_path: Path) -> None:
    shown = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S)
    up = "../" * len(tmp_path.resolve().parents) + str(FOLDER.relative_to("/"))  # kustomize takes relative paths alone
    whole, replicas = (block.replace("../sqlenv/docker/kubernetes", up) for block in shown)
    own = yaml.safe_load(whole) | yaml.safe_load(replicas)
    for written in (yaml.safe_load(whole), own):
        (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(written), encoding="utf-8")
        objects = build(tmp_path)
        assert {container["image"].partition("/")[0] for _, container in containers(objects)} == {"REGISTRY"}
        urls = variables(objects, container_of(objects, "trainer"))["INFERENCE_URLS"].split(",")
        assert len(urls) == the(objects, "StatefulSet", "inference")["spec"]["replicas"]
        model = variables(objects, container_of(objects, "inference"))["MODEL"]
        assert model == ("Qwen/Qwen3-0.6B" if "policy" in str(written) else "Qwen/Qwen2.5-0.5B-Instruct")


def test_the_slurm_script_can_be_read() -> None:
    """`tests/docs/test_pages.py` knows its flags of ours."""
    (script,) = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    (launch,) = re.findall(r"torchrun (.*?) sh docker/", script.replace("\\\n", " "))
    numbers = {"$ranks": "2", "${nodes[1]}": "n2", "$SLURM_JOB_ID": "7"}
    words = [re.sub(r"\$\w+|\$\{[^}]*\}", lambda name: numbers[name[0]], word) for word in shlex.split(launch)]
    told: Any = parse_torchrun([*words, "sh"])  # type: ignore[no-untyped-call]
    assert (told.nnodes, told.rdzv_backend, told.rdzv_endpoint, told.no_python) == ("2", "c10d", "n2:29500", True)
