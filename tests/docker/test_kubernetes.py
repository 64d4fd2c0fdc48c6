"""docker/kubernetes/: what kustomize builds is valid, and every flag, port, path, name and number in it is real."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from torch.distributed.run import parse_args as parse_torchrun

from benchmarks.server_process import ROOT
from env_server.service import http
from env_server.service.metrics import Metrics
from env_server.service.serve import CLOSE_S
from env_server.service.settings import ServiceSettings, read_settings
from inference.launch.launcher import read_arguments
from inference.launch.plan import Device, Machine, plan
from inference.launch.process import see_model
from inference.launch.supervisor import GRACE_S
from sqlenv import cli
from tests.docker.kubernetes import (
    COMPONENTS,
    FOLDER,
    NAMESPACE,
    OVERLAYS,
    Object,
    Pod,
    allowed,
    build,
    command,
    containers,
    every,
    manifests,
    matches,
    needs_kubectl,
    pod_templates,
    the,
    variables,
)
from trainer.viewer.view import PORT

pytestmark = needs_kubectl

SUPPORTED = ("1.30", "1.37")
"""Kubernetes: the oldest with everything that is used here, and the newest whose schemas there are."""
COMPONENT = "app.kubernetes.io/component"
IMAGES = {"sqlenv/env": "env", "sqlenv/trainer": "trainer"} | dict.fromkeys(
    ("sqlenv/inference", "sqlenv/inference-cpu"), "inference"
)


@pytest.fixture(scope="module")
def with_components(tmp_path_factory: pytest.TempPathFactory) -> tuple[Object, ...]:
    """The overlay of a user's own, as the comments of the components say to write it."""
    folder = tmp_path_factory.mktemp("own")
    up = our_folder_from(folder)
    own = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAMESPACE,
        "resources": [f"{up}/overlays/gpu"],
        "components": [f"{up}/components/{name}" for name in COMPONENTS],
        "configMapGenerator": [
            {"name": "environment", "namespace": NAMESPACE, "behavior": "merge", "literals": ["SQLENV_DATA=/data/shop"]}
        ],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(own), encoding="utf-8")
    return build(folder)


@pytest.fixture(params=[*OVERLAYS, "own"])
def objects(request: pytest.FixtureRequest) -> tuple[Object, ...]:
    """Each overlay of ours, and that of a user with all components."""
    if request.param == "own":
        own: tuple[Object, ...] = request.getfixturevalue("with_components")
        return own
    return manifests(request.param)


def our_folder_from(folder: Path) -> str:
    """kustomize takes folders by relative paths alone."""
    return "../" * (len(folder.resolve().parents)) + str(FOLDER.relative_to("/"))


def container_of(objects: tuple[Object, ...], workload: str) -> Object:
    (container,) = pod_templates(objects)[workload]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


@pytest.mark.parametrize("version", SUPPORTED)
def test_every_object_is_valid(version: str, with_components: tuple[Object, ...]) -> None:
    """By the schemas of Kubernetes' API, which know every field."""
    built = [*with_components, *(each for overlay in OVERLAYS for each in manifests(overlay))]
    custom = [each for each in built if each["kind"] == "PodMonitor"]  # the Prometheus operator's own
    assert len(custom) == 1
    for text in {json.dumps(each) for each in built if each not in custom}:
        kubernetes_validate.validate(json.loads(text), version, strict=True)


def test_a_field_that_does_not_exist_is_found() -> None:
    job = json.loads(json.dumps(the(manifests("gpu"), "Job", "trainer")))
    job["spec"]["template"]["spec"]["restartpolicy"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError, match="restartpolicy"):
        kubernetes_validate.validate(job, SUPPORTED[-1], strict=True)


def test_everything_is_in_one_namespace(objects: tuple[Object, ...]) -> None:
    for each in objects:
        assert each["kind"] == "Namespace" or each["metadata"]["namespace"] == NAMESPACE
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)


def test_every_pod_keeps_the_restricted_standard(objects: tuple[Object, ...]) -> None:
    """Of Pod Security, which the namespace enforces; and the file system is read-only."""
    labels = the(objects, "Namespace", NAMESPACE)["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    for template, container in containers(objects):
        pod, own = template["spec"], container["securityContext"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert own["readOnlyRootFilesystem"] is True
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert all({"configMap", "emptyDir", "persistentVolumeClaim"} & set(each) for each in pod["volumes"])
        # No token of the API server's, and none of the variables that Kubernetes makes of Services.
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False


def test_what_an_image_writes_to_can_be_written(objects: tuple[Object, ...]) -> None:
    """The folders that a Dockerfile names in variables, as the container has them."""
    for _, container in containers(objects):
        image, _, tag = container["image"].partition(":")
        text = (ROOT / "docker" / f"{IMAGES[image]}.Dockerfile").read_text(encoding="utf-8")
        assert tag == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        last = re.sub(r"\\\n\s*", " ", re.split(r"^FROM ", text, flags=re.MULTILINE)[-1])
        folders = dict(re.findall(r"\b([A-Z][A-Z_]+)=(/[\w/]+)", " ".join(re.findall(r"^ENV (.*)$", last, re.M))))
        folders = {name: path for name, path in folders.items() if name != "PATH"}
        folders |= {name: value for name, value in variables(objects, container).items() if name in folders}
        writable = [each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")]
        if container["name"] == "view":
            folders = {name: folders[name] for name in ("HOME", "XDG_CACHE_HOME")}
        if container["name"] != "wait-for-servers":
            assert "/tmp" in writable
            for name, path in folders.items():
                assert any(f"{path}/".startswith(f"{mount}/") for mount in writable), f"{name}={path}"


def test_secrets_are_referred_to_and_never_in_the_manifests(objects: tuple[Object, ...]) -> None:
    assert not every(objects, "Secret")
    asked: dict[str, bool] = {}
    for _, container in containers(objects):
        for each in container.get("env", ()):
            if "valueFrom" in each:
                secret = each["valueFrom"]["secretKeyRef"]
                assert secret["name"] == "sqlenv"
                asked[secret["key"]] = secret.get("optional", False)
            else:
                assert not re.search("TOKEN|KEY", each["name"])
    assert asked == {"env-token": False, "hf-token": True, "wandb-api-key": True}


def test_selectors_take_the_pods_that_they_mean(objects: tuple[Object, ...]) -> None:
    templates = pod_templates(objects)
    for name, template in templates.items():
        assert template["metadata"]["labels"][COMPONENT] == name
    for each in (*every(objects, "Deployment"), *every(objects, "StatefulSet"), *every(objects, "PodDisruptionBudget")):
        taken = [n for n, t in templates.items() if matches(each["spec"]["selector"], t["metadata"]["labels"])]
        assert taken == [each["metadata"]["name"]]
    for service in every(objects, "Service"):
        name, spec = service["metadata"]["name"], service["spec"]
        selector = {"matchLabels": spec["selector"]}
        assert [n for n, t in templates.items() if matches(selector, t["metadata"]["labels"])] == [name]
        assert spec["clusterIP"] == "None", "each server has an address of its own behind the name"
        ports = {port["name"]: port["containerPort"] for port in container_of(objects, name).get("ports", ())}
        for port in spec["ports"]:
            assert ports.get(port["name"], port["port"]) == port["port"]
    stateful = the(objects, "StatefulSet", "inference")["spec"]
    assert the(objects, "Service", stateful["serviceName"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_claim_and_map_that_a_pod_mounts_is_there(overlay: str) -> None:
    objects = manifests(overlay)
    for workload, template in pod_templates(objects).items():
        owner = next(each for each in objects if each["metadata"]["name"] == workload and "template" in each["spec"])
        volumes = {each["name"] for each in template["spec"]["volumes"]}
        volumes |= {each["metadata"]["name"] for each in owner["spec"].get("volumeClaimTemplates", ())}
        for key in ("initContainers", "containers"):
            for container in template["spec"].get(key, ()):
                assert {each["name"] for each in container["volumeMounts"]} <= volumes
        for each in template["spec"]["volumes"]:
            if "persistentVolumeClaim" in each:
                the(objects, "PersistentVolumeClaim", each["persistentVolumeClaim"]["claimName"])
            if "configMap" in each:
                assert any(m["metadata"]["name"] == each["configMap"]["name"] for m in every(objects, "ConfigMap"))
    weights = the(objects, "PersistentVolumeClaim", "weights")["spec"]["accessModes"]
    runs = the(objects, "PersistentVolumeClaim", "runs")["spec"]["accessModes"]
    assert weights == (["ReadWriteOnce"] if overlay == "cpu" else ["ReadWriteMany"])
    assert runs == (["ReadWriteMany"] if overlay == "multi-node" else ["ReadWriteOnce"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_environment_servers_take_their_settings(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variable is one, and with the image's own they make a server that others reach, with a token."""
    objects = manifests(overlay)
    container = container_of(objects, "env")
    own = variables(objects, container)
    assert {name.removeprefix("SQLENV_").lower() for name in own} <= set(ServiceSettings.model_fields)
    text = (ROOT / "docker" / "env.Dockerfile").read_text(encoding="utf-8")
    image = dict(re.findall(r"\b(SQLENV_\w+)=(\S+)", text))
    for name, value in (image | own).items():
        monkeypatch.setenv(name, value)
    program, *flags = command(objects, container)
    assert program == "serve"
    settings, _ = read_settings(flags)
    assert (settings.host, settings.port) == ("0.0.0.0", container["ports"][0]["containerPort"])
    assert settings.token is not None
    assert not settings.insecure
    target = the(objects, "HorizontalPodAutoscaler", "env")["spec"]["metrics"][0]["pods"]["target"]
    assert int(target["averageValue"]) == settings.max_sessions // 2


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_stop_is_given_the_time_that_it_takes(overlay: str) -> None:
    templates = pod_templates(manifests(overlay))
    env = container_of(manifests(overlay), "env")
    sleep = env["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace = float(variables(manifests(overlay), env)["SQLENV_GRACE_S"])
    longest = sleep + grace + 3 * CLOSE_S
    assert templates["env"]["spec"]["terminationGracePeriodSeconds"] > longest
    assert templates["inference"]["spec"]["terminationGracePeriodSeconds"] > GRACE_S


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_probes_ask_what_is_answered(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a token, which no probe has."""

    async def refuse() -> None:
        raise AssertionError("asked for the token")

    routes = http.router(None, refuse, dict, {}, bytes)  # type: ignore[arg-type]  # nothing is called
    free = {route.path for route in routes.routes if not route.dependencies}  # type: ignore[attr-defined]
    assert free == {"/health"}
    for workload, launched in (("env", None), ("inference", 1800.0)):
        container = container_of(manifests(overlay), workload)
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[kind]["httpGet"] == {"path": "/health", "port": container["ports"][0]["name"]}
        startup = container["startupProbe"]
        allows_s = startup["periodSeconds"] * startup["failureThreshold"]
        if launched is None:
            assert allows_s == 120, "as in its Dockerfile"
        else:
            _, options = read_arguments(command(manifests(overlay), container)[1:])
            assert options.startup_timeout_s == launched < allows_s


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_policy_server_starts_as_it_is_told(overlay: str) -> None:
    objects = manifests(overlay)
    container = container_of(objects, "inference")
    program, *flags = command(objects, container)
    assert program == "inference"
    settings, _ = read_arguments(flags)
    limits = container["resources"].get("limits", {})
    assert limits == ({} if overlay == "cpu" else {"nvidia.com/gpu": "1"})
    if limits:
        return  # `tests/docs/test_recipes.py` plans it, and the run that uses it
    (replica,) = plan(settings, see_model(settings.model), Machine("python", (), Device.CPU, cores=2))
    assert replica.arguments[replica.arguments.index("--port") + 1] == str(container["ports"][0]["containerPort"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_trainer_and_the_servers_agree(overlay: str) -> None:
    objects = manifests(overlay)
    container = container_of(objects, "trainer")
    words = command(objects, container, JOB_COMPLETION_INDEX="0")
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
    stateful = the(objects, "StatefulSet", "inference")
    service = stateful["spec"]["serviceName"]
    urls = [f"http://inference-{index}.{service}:{inference.port}" for index in range(stateful["spec"]["replicas"])]
    assert flag("vllm_server_base_url").split(",") == urls
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    served = {each["mountPath"]: each["name"] for each in container_of(objects, "inference")["volumeMounts"]}
    assert mounts[flag("weight_sync_dir")] == served[flag("weight_sync_dir")] == "weights"
    config = yaml.safe_load((ROOT / flag("config")).read_text(encoding="utf-8"))
    assert config.get("use_peft", False) == (inference.weight_sync == "lora")
    saves = variables(objects, container)["TRAIN_FLAGS"] + str(config["save_strategy"])
    assert "steps" in saves, "a lost node costs at most the steps since the last checkpoint"


def test_no_pod_is_the_first_to_be_evicted(objects: tuple[Object, ...]) -> None:
    """Kubernetes evicts pods without requests of their own before all others."""
    for _, container in containers(objects):
        assert {"cpu", "memory"} <= set(container["resources"]["requests"]), container["name"]


def test_the_metric_of_the_autoscaler_is_one_of_the_servers(with_components: tuple[Object, ...]) -> None:
    (metric,) = the(with_components, "HorizontalPodAutoscaler", "env")["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    shown = Metrics().render().decode()
    assert f"# TYPE {name} gauge" in shown
    assert re.search(rf"^{name} 0\.0$", shown, re.M), "one series a server: their mean is sessions a server"
    adapter = yaml.safe_load((FOLDER / "components" / "monitoring" / "prometheus-adapter.yaml").read_text())
    (rule,) = adapter["rules"]["custom"]
    assert rule["seriesQuery"].partition("{")[0] == name
    assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}
    # What is scraped is that port of those pods.
    monitor = the(with_components, "PodMonitor", "env")["spec"]
    template = pod_templates(with_components)["env"]
    assert matches(monitor["selector"], template["metadata"]["labels"])
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in [port["name"] for port in template["spec"]["containers"][0]["ports"]]
    assert endpoint["path"] == "/metrics"
    assert endpoint["authorization"]["credentials"] == {"name": "sqlenv", "key": "env-token"}


def test_runs_can_be_looked_at_and_not_changed(with_components: tuple[Object, ...]) -> None:
    container = container_of(with_components, "view")
    program, *paths = command(with_components, container)
    assert program in cli._COMMANDS
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    assert all(mounts[path] == {"name": "runs", "mountPath": path, "readOnly": True} for path in paths)
    assert "/runs/$(RUN)" in container_of(with_components, "trainer")["command"]
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    assert f"port-forward deployment/view {PORT}" in page


def test_one_s_own_databases_are_where_the_servers_and_the_trainer_look(with_components: tuple[Object, ...]) -> None:
    for name in ("env", "trainer"):
        container = container_of(with_components, name)
        assert variables(with_components, container)["SQLENV_DATA"] == "/data/shop"
        assert {"name": "data", "mountPath": "/data", "readOnly": True} in container["volumeMounts"]


def test_the_folder_that_the_page_shows_builds(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S)
    whole, replicas = (block.replace("../sqlenv/docker/kubernetes", our_folder_from(tmp_path)) for block in shown)
    (tmp_path / "kustomization.yaml").write_text(whole, encoding="utf-8")
    objects = build(tmp_path)
    assert {container["image"].partition("/")[0] for _, container in containers(objects)} == {"REGISTRY"}
    words = command(objects, container_of(objects, "trainer"))
    assert words[words.index("--model_name_or_path") + 1] == "Qwen/Qwen3-0.6B"
    assert "/runs/second" in words

    own = yaml.safe_load(whole) | yaml.safe_load(replicas)
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(own), encoding="utf-8")
    objects = build(tmp_path)
    urls = variables(objects, container_of(objects, "trainer"))["INFERENCE_URLS"].split(",")
    assert len(urls) == the(objects, "StatefulSet", "inference")["spec"]["replicas"] == 2


def test_the_page_says_what_each_object_is_for() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    table = page.partition("## What each object is for")[2].partition("##")[0]
    objects = [row.split("|")[1] for row in table.splitlines() if row.startswith("|")]
    for each in (*manifests("cpu"), *manifests("multi-node")):
        kind, name = each["kind"].removesuffix("y"), re.sub(r"-[a-z0-9]{10}$", "", each["metadata"]["name"])
        assert any(cell.startswith(f" {kind}") and f"`{name}`" in cell for cell in objects), f"{kind} {name}"
    assert all(f"`components/{name}`" in table for name in COMPONENTS)


def test_the_slurm_script_can_be_read() -> None:
    """`tests/docs/test_pages.py` knows its flags of ours."""
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```bash\n(.*?)^```$", page, re.M | re.S)
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    (launch,) = re.findall(r"torchrun (.*?) sh docker/", script.replace("\\\n", " "))
    numbers = {"$ranks": "2", "${nodes[1]}": "n2", "$SLURM_JOB_ID": "7"}
    words = [re.sub(r"\$\w+|\$\{[^}]*\}", lambda name: numbers[name[0]], word) for word in shlex.split(launch)]
    told: Any = parse_torchrun([*words, "sh"])  # type: ignore[no-untyped-call]
    assert (told.nnodes, told.rdzv_backend, told.rdzv_endpoint, told.no_python) == ("2", "c10d", "n2:29500", True)


def edges(objects: tuple[Object, ...]) -> set[tuple[str, str, int]]:
    """Who can open which connection, of pods of all kinds and addresses outside."""
    pods: dict[str, Pod | None] = {name: Pod({COMPONENT: name}) for name in pod_templates(objects)}
    pods["other"] = Pod({"app": "other"})
    pods["elsewhere"] = Pod({COMPONENT: "trainer"}, {"kubernetes.io/metadata.name": "default"})
    pods["monitoring"] = Pod({}, {"kubernetes.io/metadata.name": "monitoring"})
    pods["internet"] = None
    outside = {"elsewhere", "monitoring", "internet"}
    found = set()
    for (source, start), (target, end), port in product(pods.items(), pods.items(), (53, 80, 443, 8000, 29500, 40000)):
        if start is not None and not {source, target} <= outside and allowed(objects, start, end, "TCP", port):
            found.add((source, target, port))
    return found


NAMES_AND_WEB = {(pod, "internet", port) for pod in ("inference", "trainer") for port in (53, 443)} | {
    (pod, namespace, port)
    for pod in ("inference", "trainer")
    for namespace in ("elsewhere", "monitoring")
    for port in (53, 443)
}
SERVERS = {("trainer", "env", 8000), ("trainer", "inference", 8000)}


NCCL = {
    (source, target, port)
    for source, target in product(("trainer", "inference"), repeat=2)
    for port in (53, 80, 443, 8000, 29500, 40000)
}
"""The trainer's ranks and vLLM, whose ports NCCL chooses."""


def test_only_the_trainer_reaches_the_servers() -> None:
    assert edges(manifests("cpu")) == SERVERS | NAMES_AND_WEB


@pytest.mark.parametrize("overlay", ["gpu", "multi-node"])
def test_the_trainer_and_vllm_form_an_nccl_group(overlay: str) -> None:
    assert edges(manifests(overlay)) == SERVERS | NAMES_AND_WEB | NCCL


def test_who_scrapes_reaches_the_environment_servers_alone(with_components: tuple[Object, ...]) -> None:
    assert edges(with_components) == SERVERS | NAMES_AND_WEB | NCCL | {("monitoring", "env", 8000)}


def test_the_ranks_of_several_nodes_meet() -> None:
    objects = manifests("multi-node")
    job = the(objects, "Job", "trainer")["spec"]
    pod = job["template"]["spec"]
    container = container_of(objects, "trainer")
    for index in range(job["completions"]):
        program, *words = command(objects, container, JOB_COMPLETION_INDEX=str(index))
        told: Any = parse_torchrun(words)  # type: ignore[no-untyped-call]
        assert program == "torchrun"
        assert (told.nnodes, told.node_rank) == (str(job["completions"]), index)
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert told.nproc_per_node == gpus
        # The first pod of the Job, behind the Service that gives pods their names.
        assert told.master_addr == f"trainer-0.{pod['subdomain']}"
        service = the(objects, "Service", pod["subdomain"])["spec"]
        assert service["publishNotReadyAddresses"] is True
        assert told.master_port == service["ports"][0]["port"]
        assert told.no_python
        one_node = command(manifests("gpu"), container_of(manifests("gpu"), "trainer"))
        assert [told.training_script, *told.training_script_args] == one_node
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"] == 2
    flags = variables(objects, container)["TRAIN_FLAGS"].split()
    config = yaml.safe_load((ROOT / "configs" / "small-gpu.yaml").read_text(encoding="utf-8"))
    ranks = job["completions"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert flags[0] == "--gradient_accumulation_steps"
    assert int(flags[1]) * ranks == config["gradient_accumulation_steps"]


def test_every_file_is_used() -> None:
    def named(folder: Path) -> set[Path]:
        text = (folder / "kustomization.yaml").read_text(encoding="utf-8")
        return {folder / name for name in re.findall(r"[\w-]+\.(?:ya?ml|sh|py)", text)} | {
            folder / "kustomization.yaml"
        }

    folders = {path.parent for path in FOLDER.rglob("kustomization.yaml")}
    files = {path for path in FOLDER.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert files <= {path for folder in folders for path in named(folder)}
