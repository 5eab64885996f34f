"""`hvdx job kubernetes`: manifests against the fields that Kubeflow's operators know, options and errors."""

import stat
from typing import Any

import pytest
import yaml

from hvdx.cli.main import main

JOB = ["job", "kubernetes", "--image", "registry/train:1"]
KINDS = ("mpijob", "trainjob")
TEXT, NUMBER = str, int

# The fields in use, as the custom resource definitions of mpi-operator (caa3c47) and trainer (8c0f505) define them. A
# list has one element, which describes all of its elements.
POD = {
    "securityContext": {"fsGroup": NUMBER},
    "containers": [
        {
            "name": TEXT,
            "image": TEXT,
            "command": [TEXT],
            "workingDir": TEXT,
            "env": [{"name": TEXT, "value": TEXT}],
            "readinessProbe": {"tcpSocket": {"port": NUMBER}},
            "resources": {"limits": {"cpu": TEXT, "memory": TEXT, "nvidia.com/gpu": NUMBER}},
            "securityContext": {"runAsUser": NUMBER},
            "volumeMounts": [{"name": TEXT, "mountPath": TEXT}],
        }
    ],
    "volumes": [{"name": TEXT, "emptyDir": {"medium": TEXT}, "persistentVolumeClaim": {"claimName": TEXT}}],
}
METADATA = {"name": TEXT, "namespace": TEXT, "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": TEXT}}
REPLICAS = {"replicas": NUMBER, "restartPolicy": TEXT, "template": {"spec": POD}}
SCHEMAS: dict[tuple[str, str], dict[str, Any]] = {
    ("kubeflow.org/v2beta1", "MPIJob"): {
        "slotsPerWorker": NUMBER,
        "mpiImplementation": TEXT,
        "launcherCreationPolicy": TEXT,
        "sshAuthMountPath": TEXT,
        "runPolicy": {"cleanPodPolicy": TEXT, "backoffLimit": NUMBER, "activeDeadlineSeconds": NUMBER},
        "mpiReplicaSpecs": {"Launcher": REPLICAS, "Worker": REPLICAS},
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): {
        "mlPolicy": {
            "numNodes": NUMBER,
            "mpi": {
                "numProcPerNode": NUMBER,
                "mpiImplementation": TEXT,
                "sshAuthMountPath": TEXT,
                "runLauncherAsNode": bool,
            },
        },
        "template": {
            "spec": {
                "network": {"publishNotReadyAddresses": bool},
                "successPolicy": {"operator": TEXT, "targetReplicatedJobs": [TEXT]},
                "failurePolicy": {"maxRestarts": NUMBER},
                "replicatedJobs": [
                    {
                        "name": TEXT,
                        "dependsOn": [{"name": TEXT, "status": TEXT}],
                        "template": {"metadata": METADATA, "spec": {"template": {"spec": POD}}},
                    }
                ],
            }
        },
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): {
        "runtimeRef": {"kind": TEXT, "name": TEXT},
        "activeDeadlineSeconds": NUMBER,
        "trainer": {
            "numNodes": NUMBER,
            "numProcPerNode": NUMBER,
            "command": [TEXT],
            "env": [{"name": TEXT, "value": TEXT}],
        },
    },
}


def check(value: Any, schema: Any, path: str) -> None:
    """Check that a value has only fields of a schema, each of its type."""
    if isinstance(schema, dict):
        assert isinstance(value, dict), path
        for key, part in value.items():
            assert key in schema, f"{path}.{key}"
            check(part, schema[key], f"{path}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), path
        assert value, path
        for i, part in enumerate(value):
            check(part, schema[0], f"{path}[{i}]")
    else:
        assert type(value) is schema, f"{path}: {value!r}"


@pytest.fixture
def manifest(capsys):
    """Return a function that gives the objects of a manifest by kind."""

    def objects(*words: str) -> dict[str, Any]:
        assert main([*JOB, *words]) == 0
        found = list(yaml.safe_load_all(capsys.readouterr().out))
        return {one["kind"]: one for one in found}

    return objects


ALL = [
    *("--nodes=4", "--gpus-per-node=2", "--cpus-per-task=3", "--memory=16Gi", "--namespace=ml", "--claim=data:/data"),
    *("--folder=/data/run", "--time=1:00:00", "--name=mine", "--checkpoint=/data/ckpt", "--max-restarts=7"),
    "--strategy=threshold:target_density=0.01",
]


@pytest.mark.parametrize("options", [[], ALL], ids=["least", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_operators_know_all_fields(manifest, kind, options):
    for one in manifest("--kind", kind, *options, "--", "python", "train.py").values():
        check(one["metadata"], METADATA, "metadata")
        check(one["spec"], SCHEMAS[one["apiVersion"], one["kind"]], one["kind"])


def launcher_of(objects: dict[str, Any]) -> dict[str, Any]:
    """Return the command and the variables of the launcher."""
    if "TrainJob" in objects:
        return objects["TrainJob"]["spec"]["trainer"]
    return objects["MPIJob"]["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]


def worker_of(objects: dict[str, Any]) -> dict[str, Any]:
    """Return the specification of a pod in which ranks run."""
    if "TrainJob" in objects:
        jobs = objects["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
        return next(job for job in jobs if job["name"] == "node")["template"]["spec"]["template"]["spec"]
    return objects["MPIJob"]["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]


@pytest.mark.parametrize("kind", KINDS)
def test_options_reach_the_ranks(manifest, kind):
    objects = manifest("--kind", kind, *ALL, "--", "python", "train.py", "--text", 'a "b" $(date) #c')
    launcher = launcher_of(objects)
    restarts = ["--checkpoint", "/data/ckpt", "--max-restarts", "7"]
    program = ["python", "train.py", "--text", 'a "b" $$(date) #c']
    assert launcher["command"] == ["hvdx", "run", "--hostfile", "/etc/mpi/hostfile", *restarts, *program]
    variables = {one["name"]: one["value"] for one in launcher["env"]}
    assert variables == {"HVDX_CPUS_PER_TASK": "3", "HVDX_STRATEGY": "threshold:target_density=0.01"}
    pod = worker_of(objects)
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": "6", "memory": "16Gi", "nvidia.com/gpu": 2}
    assert container["workingDir"] == "/data/run"
    mounted = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert mounted == {"shm": "/dev/shm", "data": "/data"}
    assert {one["name"] for one in pod["volumes"]} == {"shm", "data"}
    assert all(one["metadata"]["namespace"] == "ml" for one in objects.values())


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_and_restarts(manifest, kind):
    def numbers(*words: str) -> tuple[int, int, int]:
        objects = manifest("--kind", kind, *words, "--", "x")
        if kind == "mpijob":
            spec = objects["MPIJob"]["spec"]
            count = spec["mpiReplicaSpecs"]["Worker"]["replicas"]
            return count, spec["slotsPerWorker"], spec["runPolicy"]["backoffLimit"]
        job, runtime = objects["TrainJob"]["spec"]["trainer"], objects["TrainingRuntime"]["spec"]
        assert job["numNodes"] == runtime["mlPolicy"]["numNodes"]
        assert job["numProcPerNode"] == runtime["mlPolicy"]["mpi"]["numProcPerNode"]
        return job["numNodes"], job["numProcPerNode"], runtime["template"]["spec"]["failurePolicy"]["maxRestarts"]

    assert numbers() == (1, 1, 0)
    assert numbers("--nodes", "4", "--gpus-per-node", "2") == (4, 2, 0)
    assert numbers("--nodes", "2", "--tasks-per-node", "3", "--checkpoint", "ckpt") == (2, 3, 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["job", "kubernetes", "--", "x"], "--image: expected the name of an image"),
        ([*JOB, "--"], "expected a command after --"),
        ([*JOB, "--kind", "pod", "--", "x"], "--kind: expected mpijob or trainjob"),
        ([*JOB, "--nodes", "0", "--", "x"], "--nodes: expected 1"),
        ([*JOB, "--memory", "much", "--", "x"], "--memory: expected a size"),
        ([*JOB, "--claim", "data", "--", "x"], "--claim: expected NAME:PATH"),
        ([*JOB, "--claim", "Data:/data", "--", "x"], "--claim: expected up to 40"),
        ([*JOB, "--name", "a_b", "--", "x"], "--name: expected up to 40"),
        ([*JOB, "--name", "a" * 41, "--", "x"], "--name: expected up to 40"),
        ([*JOB, "--max-restarts", "3", "--", "x"], "expected --checkpoint DIR too"),
        ([*JOB, "--time", "12h", "--", "x"], "--time: expected HH:MM:SS"),
        ([*JOB, "--strategy", "treshold", "--", "x"], "did you mean threshold"),
    ],
)
def test_errors_name_the_option_and_the_remedy(words, message, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Do: " in captured.err or "Write it as" in captured.err
    assert captured.out == ""


def test_submitted_by_kubectl(tmp_path, monkeypatch, capsys):
    tool = tmp_path / "kubectl"
    tool.write_text('#!/bin/sh\necho "$@"\n[ "$3" = - ] && cat\nexit 0\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    assert main([*JOB, "--submit", "--", "python", "train.py"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("apply -f -\n# hvdx job kubernetes")
    assert main([*JOB, "--submit", "-o", "job.yaml", "--", "python", "train.py"]) == 0
    assert capsys.readouterr().out == "apply -f job.yaml\n"
    assert not (tmp_path / "job.yaml").stat().st_mode & stat.S_IXUSR
