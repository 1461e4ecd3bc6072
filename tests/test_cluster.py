"""The files that start a run on a cluster: their commands are taken apart as the trainer does."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from moe_jax.config import parse_command_line
from moe_jax.train.flags import Cluster, take_flags

FOLDER = Path(__file__).resolve().parents[1] / "cluster"


def checked(words, num_devices):
    """What a command ``python -m moe_jax.train ...`` says; its fields fit so many devices."""
    assert words[0].startswith("python") and words[1:3] == ["-m", "moe_jax.train"]
    flags, rest = take_flags(words[3:])
    config, workdir = parse_command_line(rest, usage="")
    assert num_devices % config.mesh.expert == 0 == config.data.batch_size % num_devices
    return flags.cluster, config, workdir


def arguments_of(script, program, tmp_path, **environment):
    """The arguments with which a script calls ``program``."""
    (tmp_path / program).write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" > "{tmp_path}/arguments"\n')
    (tmp_path / program).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run([FOLDER / script], env={**os.environ, **environment, "PATH": path}, check=True)
    return (tmp_path / "arguments").read_text().split("\0")[:-1]


def test_slurm(tmp_path):
    words = arguments_of("slurm.sh", "srun", tmp_path, WORKDIR="runs/a b")
    text = (FOLDER / "slurm.sh").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.MULTILINE))
    # jax takes the GPU of the process's number on its node, among all that the process sees.
    assert options["ntasks-per-node"] == options["gpus-per-node"] and "gpus-per-task" not in options
    num_devices = int(options["nodes"]) * int(options["gpus-per-node"])
    cluster, config, workdir = checked(words, num_devices)
    assert cluster == Cluster() and config.mesh.expert == 8 and workdir == Path("runs/a b")


def test_tpu_pod(tmp_path):
    environment = dict(TPU="pod", ZONE="z", BUCKET="/mnt/bucket", EXPERT="4")
    *place, command = arguments_of("tpu_pod.sh", "gcloud", tmp_path, **environment)
    assert place[:6] == ["compute", "tpus", "tpu-vm", "ssh", "pod", "--zone"]
    words = shlex.split(command)
    cluster, config, workdir = checked(words[words.index("python3") :], 32)
    assert cluster == Cluster() and config.mesh.expert == 4
    assert workdir == Path("/mnt/bucket/runs/pod")


def test_kubernetes():
    service, job = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    spec = job["spec"]["template"]["spec"]
    [container] = spec["containers"]
    words = shlex.split(container["args"][0].replace("$JOB_COMPLETION_INDEX", "3"))
    assert words[0] == "exec"  # so that SIGTERM reaches it
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    cluster, _, _ = checked(words[1:], gpus * job["spec"]["completions"])
    assert cluster.num_processes == job["spec"]["completions"] == job["spec"]["parallelism"]
    host = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert cluster.coordinator.partition(":")[0] == host
    assert spec["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]


@pytest.mark.parametrize("script", sorted(path.name for path in FOLDER.glob("*.sh")))
def test_scripts_are_bash(script):
    subprocess.run(["bash", "-n", FOLDER / script], check=True)
