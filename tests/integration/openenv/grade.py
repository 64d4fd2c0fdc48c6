"""Judge a running server with upstream's own validators; runs in upstream's virtual environment.

    PYTHON grade.py URL FOLDER < PLAN

FOLDER holds `openenv.yaml`, which upstream's parser reads; the plan is upstream's runtime plan, as JSON. Prints JSON:
the report of `validate_running_environment`, what the runtime collector saw, and the verdict of every grader that this
manifest selects.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import certifi
from openenv.cli._validation import validate_running_environment
from openenv.validation.graders import Subject
from openenv.validation.parsers.openenv_yaml import OpenEnvYamlParser
from openenv.validation.policy import load_policy
from openenv.validation.report import CheckResult
from openenv.validation.runner import default_grader_registry
from openenv.validation.runtime.collector import collect_runtime_evidence
from openenv.validation.runtime.contracts import RuntimePlan
from openenv.validation.runtime.scheduler import execute_graders
from openenv.validation.types import CheckStatus, Level

EPISODE_TIMEOUT_S = 60.0


def main(url: str, folder: str) -> None:
    if authority := os.environ.get("SSL_CERT_FILE"):
        # The collector's HTTP client looks at no variable: it trusts certifi's authorities alone.
        certifi.where = lambda: authority
    report = validate_running_environment(url)
    manifest = OpenEnvYamlParser().parse(Path(folder))
    plan = RuntimePlan.model_validate(json.load(sys.stdin))
    evidence = collect_runtime_evidence(url, plan, episode_timeout_s=EPISODE_TIMEOUT_S)
    subject = Subject(
        root=Path(folder),
        manifest=manifest,
        image_ref=None,
        running=None,
        outputs_dir=Path(folder),
        runtime_evidence=evidence,
    )
    # In upstream's runner this is what building and starting the container gives.
    started = CheckResult(check_id="runtime.startup", status=CheckStatus.PASS, evidence=[], duration_s=0)
    graders = default_grader_registry(load_policy("v2")).select(manifest, Level.RUNTIME)
    results = execute_graders(graders, subject, prior=[started])
    print(
        json.dumps(
            {
                "report": report,
                "failure": evidence.failure_reason,
                "operations": [exchange.operation for exchange in evidence.exchanges],
                "grades": {result.check_id: [result.status.value, result.evidence] for result in results},
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
