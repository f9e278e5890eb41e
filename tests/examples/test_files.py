"""Every example is listed, and those for clusters are what they say."""

import pathlib
import re
import subprocess
from typing import Any

import pytest
import yaml

from dilocox_jax.config import from_mapping
from experiments.runtime.command_line import TRY_AGAIN
from tests import slurm_script

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
SLURM = (EXAMPLES / "slurm.sh").read_text()
SKYPILOT = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
SERVICE, JOB = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
COMMANDS = {
  "slurm.sh": SLURM,
  "kubernetes.yaml": CONTAINER["args"][0],
  "skypilot.yaml": SKYPILOT["run"],
}

# Importing the programs would define their flags in this process.
SOURCES = [
  *(EXAMPLES.parent / "experiments" / "runtime").glob("*_flag*.py"),
  EXAMPLES.parent / "experiments" / "train.py",
]
KNOWN_FLAGS = {
  flag
  for path in SOURCES
  for flag in re.findall(r'DEFINE_\w+\(\s*"(\w+)"', path.read_text())
}


def flags_of(command):
  """The flags of the program `train` in a command, with their values."""
  _, _, arguments = command.rpartition("experiments.train")
  pairs = re.findall(r"--([\w.]+)(?:=\"?([^\s\"]*))?", arguments)
  return dict(pairs)


def test_the_readme_has_a_line_for_each_file():
  names = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
  readme = (EXAMPLES / "README.md").read_text()
  listed = re.findall(r"^\| \[([\w.]+)\]\(\1\) \|", readme, re.MULTILINE)
  assert sorted(listed) == sorted(names - {"README.md"})


@pytest.mark.parametrize("name", ["kubernetes.yaml", "skypilot.yaml"])
def test_what_was_not_run_says_so_in_its_first_lines(name):
  first_lines = (EXAMPLES / name).read_text().splitlines()[:3]
  assert "NOT RUN" in "\n".join(first_lines)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_flags_of_an_example_exist_and_make_a_config(name):
  values: dict[str, Any] = {"mesh.layout": "mesh"}  # As --distributed sets it.
  for flag, value in flags_of(COMMANDS[name]).items():
    section, _, field = flag.partition(".")
    assert section in KNOWN_FLAGS | {"config"}, flag
    if field:
      values[field] = int(value) if value.isdigit() else value
  assert from_mapping(values).mesh.num_data_shards > 1


@pytest.mark.parametrize("script", [SLURM, SKYPILOT["run"]])
def test_a_shell_can_read_the_script(script):
  subprocess.run(["bash", "-n"], input=script, text=True, check=True)


# Slurm.


def submit(folder, code, restarts):
  """Runs the script; returns its code and the requeued job."""
  ended, requeued = slurm_script.submit(
    SLURM,
    folder,
    code=code,
    restarts=restarts,
    arguments=["--config.total_steps=9"],
  )
  return ended, requeued.strip()


@pytest.mark.parametrize("code", [TRY_AGAIN, 134, 137, 143])
@pytest.mark.parametrize(
  ("restarts", "requeued"), [(0, "requeue 7"), (19, "requeue 7"), (20, "")]
)
def test_a_job_that_can_go_on_is_requeued_and_not_for_ever(
  code, restarts, requeued, tmp_path
):
  assert submit(tmp_path, code, restarts) == (code, requeued)
  assert "--config.total_steps=9" in (tmp_path / "srun.out").read_text()


@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_a_job_that_has_ended_or_would_fail_again_is_not_requeued(
  code, tmp_path
):
  assert submit(tmp_path, code, restarts=0) == (code, "")


def test_the_mesh_of_the_script_has_a_device_for_each_task():
  options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", SLURM, re.MULTILINE))
  assert options["signal"] == "TERM@600" and "requeue" in options
  given = flags_of(SLURM)
  sizes = ("num_replicas", "num_data_shards", "num_stages")
  num_devices = 1
  for size in sizes:
    num_devices *= int(given[f"config.mesh.{size}"])
  num_tasks = int(options["nodes"]) * int(options["ntasks-per-node"])
  assert num_devices == num_tasks
  assert options["gpus-per-node"] == options["ntasks-per-node"]


# Kubernetes.


def test_failures_that_would_come_again_end_the_job():
  assert POD["restartPolicy"] == "Never"  # Else the API refuses a policy.
  fail, ignore = JOB["spec"]["podFailurePolicy"]["rules"]
  assert fail["action"] == "FailJob"
  assert fail["onExitCodes"] == {
    "containerName": CONTAINER["name"],
    "operator": "In",
    "values": [1, 2],
  }
  assert ignore["action"] == "Ignore"
  assert ignore["onPodConditions"][0]["type"] == "DisruptionTarget"


def test_pods_find_process_0_and_are_as_many_as_it_waits_for():
  given = flags_of(CONTAINER["args"][0])
  num_pods = JOB["spec"]["completions"]
  name = JOB["metadata"]["name"]
  assert JOB["spec"]["completionMode"] == "Indexed"
  assert JOB["spec"]["parallelism"] == num_pods == int(given["num_processes"])
  assert given["process_id"] == "$JOB_COMPLETION_INDEX"
  assert given["coordinator"].split(":")[0] == f"{name}-0.{POD['subdomain']}"
  assert SERVICE["metadata"]["name"] == POD["subdomain"]
  assert SERVICE["spec"]["clusterIP"] == "None"
  assert SERVICE["spec"]["publishNotReadyAddresses"] is True
  assert SERVICE["spec"]["selector"] == {"job-name": name}
  num_replicas = int(given["config.mesh.num_replicas"])
  num_shards = int(given["config.mesh.num_data_shards"])
  devices = CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
  assert num_replicas * num_shards == num_pods * devices


def test_pods_have_time_to_save_and_hear_that_they_must():
  assert POD["terminationGracePeriodSeconds"] >= 600
  command = CONTAINER["args"][0]
  assert command.startswith("exec ")
  assert float(flags_of(command)["start_timeout_s"]) > 360


# SkyPilot.


def test_a_replica_in_a_cloud_has_a_name_and_a_secret_of_its_owner_alone():
  given = flags_of(SKYPILOT["run"])
  assert given["replica"] == "$REPLICA" and given["mailbox"] == "$PLACE"
  assert SKYPILOT["envs"]["REPLICA"] is None  # It must be given.
  assert SKYPILOT["envs"]["PLACE"].startswith("s3://")
  copy = SKYPILOT["run"].splitlines()[0]
  (source,) = SKYPILOT["file_mounts"]
  assert copy == f"install -m 600 {source} ~/run.secret"
  assert given["secret"] == "$HOME/run.secret"
  # The keys of the bucket are secrets, which no file holds.
  assert set(SKYPILOT["secrets"].values()) == {None}
