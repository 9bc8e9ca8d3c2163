"""The example of docs/howto/cluster.md for Kubernetes: its names fit each other, and its command runs in its
environment.

Kubernetes itself does not run here. What it gives a pod of an indexed Job is in the documentation of Job and Pod: the
variable JOB_COMPLETION_INDEX, the host's name JOB-INDEX, and below a headless service the name JOB-INDEX.SERVICE.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.deadlines import PROGRAM_DEADLINE_S, patient
from kit.processes import ROOT, Process, free_port

yaml = pytest.importorskip("yaml", reason="PyYAML, which comes with what builds the documentation")

pytestmark = pytest.mark.timeout(patient(120))
PAGE = ROOT / "docs/howto/cluster.md"
SECRET = "a secret of this job"


@pytest.fixture(scope="module")
def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    """The Service and the Job."""
    text = re.search(r"<!-- file: fleet.yaml -->\n```yaml\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    service, job = yaml.safe_load_all(text[1])
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    return service, job


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["template"]["spec"]


def variables(job: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod_of(job)["containers"]
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def test_the_names_and_numbers_of_the_manifest_fit_each_other(manifest):
    service, job = manifest
    name, below = job["metadata"]["name"], service["metadata"]["name"]
    assert service["spec"] == {"clusterIP": "None", "selector": {"job-name": name}}
    assert pod_of(job)["subdomain"] == below
    assert variables(job)["MASTER_ADDR"] == f"{name}-0.{below}"
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert str(spec["completions"]) == str(spec["parallelism"]) == variables(job)["WORLD_SIZE"]
    # Kubernetes takes backoffLimitPerIndex only with this.
    assert (pod_of(job)["restartPolicy"], spec["backoffLimitPerIndex"]) == ("Never", 0)
    (rule,) = pod_of(job)["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["labelSelector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    text = PAGE.read_text("utf-8")
    secret = variables(job)["NDPY_FLEET_TOKEN"]["secretKeyRef"]
    assert f"kubectl create secret generic {secret['name']} --from-literal={secret['key']}=" in text
    assert f"--selector job-name={name},batch.kubernetes.io/job-completion-index=0" in text


def test_its_command_runs_in_the_environment_of_each_pod(manifest, tmp_path: Path):
    _, job = manifest
    (container,) = pod_of(job)["containers"]
    program, *words = container["command"]
    assert program == "ndpy"
    report, port = tmp_path / "report.json", str(free_port())

    def start(index: int, *more: str) -> Process:
        given = dict(variables(job))
        assert given.pop("NDPY_FLEET_NODE") == {"fieldRef": {"fieldPath": "spec.nodeName"}}
        assert "secretKeyRef" in given.pop("NDPY_FLEET_TOKEN")
        given |= {"JOB_COMPLETION_INDEX": str(index), "NDPY_FLEET_NODE": f"worker{index}", "NDPY_FLEET_TOKEN": SECRET}
        # This machine has neither the name of rank 0 nor the port for itself.
        given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NDPY_ADAPTER": "soft0"}
        return stack.enter_context(Process(sys.executable, "-m", "ndpy", *words, *more, variables=given))

    with contextlib.ExitStack() as stack:
        others = [start(index, "soft0") for index in range(1, job["spec"]["completions"])]
        start(0, "soft0", "--rounds", "3", "--json", str(report)).succeed(PROGRAM_DEADLINE_S)
        for other in others:
            other.succeed(PROGRAM_DEADLINE_S)
    told = json.loads(report.read_text("utf-8"))
    assert [machine["node"] for machine in told["machines"]] == [f"worker{index}" for index in range(4)]
    assert (told["engine"], told["ranks"], told["suspects"]) == ("rendezvous", 4, [])
