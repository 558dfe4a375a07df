"""The manifests of `examples/kubernetes`: their schemas, and their command lines in network namespaces as pods.

No cluster is here. Of batch/v1 and v1 the schemas are those of Kubernetes' OpenAPI, in the package kubernetes-validate.
Of the PyTorchJob it is what the CustomResourceDefinition of kubeflow/training-operator 1.9.0 says of it
(manifests/base/crds/kubeflow.org_pytorchjobs.yaml), and its pods are checked as v1 templates of pods.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from tests.system.ssh_hosts import SshHosts, ssh_hosts

from paceline.launcher.secret import write_secret

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
KUBERNETES = "1.25", "1.37"  # the oldest and the newest schemas that the package has
INTEGER, TEXT, FLAG = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}
REPLICAS = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"replicas": INTEGER, "restartPolicy": TEXT, "template": {"type": "object"}},
}
PYTORCHJOB = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "kubeflow.org/v1"},
        "kind": {"const": "PyTorchJob"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["pytorchReplicaSpecs"],
            "properties": {
                "nprocPerNode": TEXT,
                "pytorchReplicaSpecs": {
                    "type": "object",
                    "additionalProperties": False,  # the CRD allows others, and the operator's webhook does not
                    "properties": {"Master": REPLICAS, "Worker": REPLICAS},
                },
                "elasticPolicy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        **dict.fromkeys(("minReplicas", "maxReplicas", "maxRestarts", "rdzvPort"), INTEGER),
                        **dict.fromkeys(("rdzvBackend", "rdzvHost", "rdzvId"), TEXT),
                        "rdzvConf": {"type": "array"},
                        "standalone": FLAG,
                    },
                },
                "runPolicy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        **dict.fromkeys(("activeDeadlineSeconds", "backoffLimit", "ttlSecondsAfterFinished"), INTEGER),
                        **dict.fromkeys(("cleanPodPolicy", "managedBy"), TEXT),
                        "schedulingPolicy": {"type": "object"},
                        "suspend": FLAG,
                    },
                },
            },
        },
    },
}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def check(document: dict[str, Any]) -> None:
    """Raises jsonschema's ValidationError. Fails where the validator is missing."""
    try:
        import jsonschema
        import kubernetes_validate
    except ImportError:
        pytest.fail("make test-system needs kubernetes-validate: pip install '.[system]'", pytrace=False)
    if document["kind"] != "PyTorchJob":
        for version in KUBERNETES:
            kubernetes_validate.validate(document, version, strict=True)
        return
    jsonschema.validate(document, PYTORCHJOB)
    for replicas in document["spec"]["pytorchReplicaSpecs"].values():
        check({"apiVersion": "v1", "kind": "PodTemplate", "template": replicas["template"]})


def job() -> dict[str, Any]:
    return documents("job.yaml")[1]


def pytorchjob() -> dict[str, Any]:
    return documents("pytorchjob.yaml")[0]


def test_the_manifests_fit_their_schemas() -> None:
    found = [document for name in ("job.yaml", "pytorchjob.yaml") for document in documents(name)]
    assert [document["kind"] for document in found] == ["Service", "Job", "PyTorchJob"]
    for document in found:
        check(document)


def _pods(document: dict[str, Any]) -> dict[str, Any]:
    pods = document["spec"].get("template") or document["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    found: dict[str, Any] = pods["spec"]
    return found


@pytest.mark.parametrize("make", [job, pytorchjob])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda document: document["spec"].update(complettions=2),
        lambda document: _pods(document)["containers"][0].update(command="paceline run"),
        lambda document: _pods(document)["containers"][0].pop("name"),
        lambda document: _pods(document)["volumes"][0].update(emptydir={}),
    ],
)
def test_a_faulty_manifest_does_not_fit(
    make: Callable[[], dict[str, Any]], spoil: Callable[[dict[str, Any]], None]
) -> None:
    import jsonschema

    document = copy.deepcopy(make())
    spoil(document)
    with pytest.raises(jsonschema.ValidationError):
        check(document)


def test_what_no_schema_sees() -> None:
    """The Service finds the pods, which take its name; the numbers agree."""
    service, indexed = documents("job.yaml")
    name, spec = indexed["metadata"]["name"], indexed["spec"]
    assert service["spec"]["selector"] == {"job-name": name}  # a label that the Job's controller sets
    assert service["spec"]["clusterIP"] == "None"
    assert _pods(indexed)["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    words = shlex.split(_pods(indexed)["containers"][0]["command"][2])
    given = dict(itertools.pairwise(words))
    assert given["--nnodes"] == str(spec["completions"]) == str(spec["parallelism"])
    assert given["--master-addr"] == f"{name}-0.{service['metadata']['name']}"
    for document in (indexed, pytorchjob()):
        assert len(f"{document['metadata']['name']}-master-0") < 64


def test_the_dockerfile() -> None:
    """Not built here. What it copies is there, its pip line is the README's, and the manifests run what it holds."""
    lines = re.sub(r"\\\n\s*", "", (FOLDER / "Dockerfile").read_text()).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert {step for step, _ in steps} <= {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "CMD"}
    copied = [source for step, rest in steps if step == "COPY" for source in rest.split()[:-1]]
    assert all((ROOT / source).exists() for source in copied)
    install = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("pip install -c"))
    words = install.partition("#")[0].removeprefix("pip install").strip()
    assert [rest for step, rest in steps if step == "RUN"][-1] == f"pip install --no-cache-dir {words}"
    where = next(rest for step, rest in steps if step == "WORKDIR")
    for document in (job(), pytorchjob()):
        assert _pods(document)["containers"][0]["workingDir"] == where
        assert "examples" in copied


# ---------------------------------------------------------------- run, in namespaces as pods


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("pods"), 2, {"node1": "digits-0.digits digits-master-0"}) as made:
        yield made


def run(pods: SshHosts, command: list[str], environs: list[dict[str, str]], out: Path) -> list[str]:
    """stdout of the pods' command, each with its environment. The model goes to `out`."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    started = []
    for name, environ in zip(pods.names, environs):
        # A pod's /etc/hosts maps its own name to its own address, which gloo finds; this one's to 127.0.1.1.
        place = {**environ, "PATH": path, "GLOO_SOCKET_IFNAME": "eth0"}
        started.append(pods.start(name, *command, cwd=ROOT, environ=place))
    printed = []
    for process in started:
        try:
            text, error = process.communicate(timeout=240)
        finally:
            process.kill()
        assert process.returncode == 0, error
        printed.append(text)
    assert out.exists()
    return printed


def alike(one: Path, other: Path) -> bool:
    """Two runs of digits.py in fp32, whose weights differ by 4e-7 (its docstring)."""
    first, second = load_file(one), load_file(other)
    gaps = {name: (value.double() - second[name].double()).norm() for name, value in first.items()}
    return all(gap <= 1e-4 * (1 + first[name].double().norm()) for name, gap in gaps.items())


def test_the_command_lines_run_and_give_one_model(pods: SshHosts, tmp_path: Path) -> None:
    """The Job's by its pods' number; the PyTorchJob's by the variables of the operator (controller.v1/pytorch/envvar.go
    and master.go of 1.9.0), which say RANK of the pod and WORLD_SIZE of processes."""
    shell = _pods(job())["containers"][0]["command"]
    assert shell[:2] == ["sh", "-c"]
    indexed = tmp_path / "job.safetensors"
    secret = tmp_path / "secret"  # a file of the pods', by way of a Secret
    write_secret(str(secret))
    mounted = next(word for word in shell[2].split() if word.startswith("/run/secrets/"))
    line = [*shell[:2], f"{shell[2].strip().replace(mounted, str(secret))} --out {indexed}"]
    run(pods, line, [{"JOB_COMPLETION_INDEX": str(index)} for index in range(2)], indexed)

    spec = pytorchjob()["spec"]
    replicas = sum(kind["replicas"] for kind in spec["pytorchReplicaSpecs"].values())
    size = replicas * int(spec["nprocPerNode"])
    everywhere = {
        "PYTHONUNBUFFERED": "1",
        "MASTER_PORT": "23456",
        "PET_MASTER_PORT": "23456",
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "digits-master-0",
        "PET_MASTER_ADDR": "digits-master-0",
        "PET_RDZV_SECRET_FILE": str(secret),
        "PET_NNODES": str(replicas),
        "PET_NPROC_PER_NODE": spec["nprocPerNode"],
    }
    environs = [{**everywhere, "RANK": str(rank), "PET_NODE_RANK": str(rank)} for rank in range(replicas)]
    operator = tmp_path / "operator.safetensors"
    command = _pods(pytorchjob())["containers"][0]["command"]
    run(pods, [*command, "--out", str(operator)], environs, operator)

    alone = tmp_path / "alone.safetensors"
    python = [sys.executable, "examples/digits.py", "--epochs", "4", "--out", str(alone)]
    run(pods, python, [{}], alone)
    assert alike(alone, indexed)
    assert alike(alone, operator)


def test_one_process_in_each_pod_of_a_pytorchjob(pods: SshHosts, tmp_path: Path) -> None:
    """`python script.py`, without a launcher: start() reads the operator's RANK and WORLD_SIZE."""
    out = tmp_path / "model.safetensors"
    everywhere = {"MASTER_ADDR": "digits-master-0", "MASTER_PORT": "23457", "WORLD_SIZE": "2", "PET_NNODES": "2"}
    environs = [{**everywhere, "RANK": rank, "PET_NODE_RANK": rank, "PET_NPROC_PER_NODE": "1"} for rank in "01"]
    run(pods, [sys.executable, "examples/digits.py", "--epochs", "1", "--out", str(out)], environs, out)
