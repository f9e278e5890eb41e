"""The scripts and files that docs/clusters/ shows."""

import os
import pathlib
import re
import subprocess
import textwrap

import pytest
import yaml

from experiments.runtime.command_line import TRY_AGAIN

DOCS = pathlib.Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"(?:^    .*\n|^\n(?=    ))+", re.MULTILINE)


def blocks(page):
  """The indented blocks of a page, without their indentation."""
  text = (DOCS / page).read_text()
  return [textwrap.dedent(block) for block in BLOCK.findall(text)]


# Slurm.

SCRIPTS = [block for block in blocks("clusters/slurm.md") if "#SBATCH" in block]
# Codes after which the same command continues the run:
# docs/clusters/failures.md.
CONTINUED = (TRY_AGAIN, 134, 137, 143)


def submit(script, folder, code, restarts):
  """Runs a script as Slurm does; returns it and whether it was requeued."""
  for name, text in (
    ("srun", f'echo "$@" > {folder}/srun.out\nexit {code}'),
    ("scontrol", f'echo "$@" > {folder}/scontrol.out'),
  ):
    program = folder / name
    program.write_text(f"#!/bin/bash\n{text}\n")
    program.chmod(0o755)
  activate = folder / ".venv" / "bin" / "activate"
  activate.parent.mkdir(parents=True)
  activate.write_text("")
  environment = os.environ | {
    "PATH": f"{folder}:{os.environ['PATH']}",
    "SLURM_JOB_ID": "7",
    "SLURM_ARRAY_TASK_ID": "3",
  }
  if restarts:
    environment["SLURM_RESTART_COUNT"] = str(restarts)
  done = subprocess.run(["bash", "-c", script], cwd=folder, env=environment)
  requeued = folder / "scontrol.out"
  if requeued.exists():
    assert requeued.read_text() == "requeue 7\n"
  return done.returncode, requeued.exists()


def test_the_page_has_a_script_of_one_run_and_one_of_an_array():
  assert len(SCRIPTS) == 2
  assert "--distributed" in SCRIPTS[0] and "--array" in SCRIPTS[1]


@pytest.mark.parametrize("script", SCRIPTS, ids=["one run", "array"])
@pytest.mark.parametrize(
  ("code", "restarts", "is_requeued"),
  [
    *((code, 0, True) for code in CONTINUED),
    *((code, 19, True) for code in CONTINUED),
    *((code, 20, False) for code in CONTINUED),
    *((code, 0, False) for code in (0, 1, 2, 130)),
  ],
)
def test_a_job_is_requeued_where_it_can_go_on_and_not_for_ever(
  script, code, restarts, is_requeued, tmp_path
):
  assert submit(script, tmp_path, code, restarts) == (code, is_requeued)
  assert "experiments.train" in (tmp_path / "srun.out").read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=["one run", "array"])
def test_a_job_is_warned_before_its_time_limit_and_may_be_requeued(script):
  options = " ".join(
    line.removeprefix("#SBATCH ")
    for line in script.splitlines()
    if line.startswith("#SBATCH ")
  ).split()
  assert "--signal=TERM@600" in options and "--requeue" in options


# Kubernetes.


@pytest.fixture(name="objects", scope="module")
def objects_fixture():
  """The objects of the page's first file, by kind."""
  (job,) = [
    each for each in blocks("clusters/kubernetes.md") if "kind: Job" in each
  ]
  loaded = yaml.safe_load_all(job)
  return {each["kind"]: each for each in loaded}


@pytest.fixture(name="pod")
def pod_fixture(objects):
  return objects["Job"]["spec"]["template"]["spec"]


def flags(container):
  """The flags of a container's command."""
  words = " ".join(container["args"]).split()
  pairs = (word.split("=", 1) for word in words if "=" in word)
  return dict(pairs)


def test_failures_that_would_come_again_end_the_job(objects, pod):
  policy = objects["Job"]["spec"]["podFailurePolicy"]
  assert pod["restartPolicy"] == "Never"  # Else the API refuses a policy.
  fail, ignore = policy["rules"]
  assert fail["action"] == "FailJob"
  assert fail["onExitCodes"]["values"] == [1, 2]
  assert fail["onExitCodes"]["operator"] == "In"
  (container,) = pod["containers"]
  assert fail["onExitCodes"]["containerName"] == container["name"]
  assert ignore["action"] == "Ignore"
  assert ignore["onPodConditions"][0]["type"] == "DisruptionTarget"


def test_pods_find_process_0_and_are_as_many_as_it_waits_for(objects, pod):
  job = objects["Job"]
  service = objects["Service"]
  given = flags(pod["containers"][0])
  count = job["spec"]["completions"]
  assert job["spec"]["completionMode"] == "Indexed"
  assert job["spec"]["parallelism"] == count == int(given["--num_processes"])
  assert given["--process_id"] == "$JOB_COMPLETION_INDEX"
  first = f"{job['metadata']['name']}-0.{pod['subdomain']}"
  assert given["--coordinator"].split(":")[0] == first
  assert service["metadata"]["name"] == pod["subdomain"]
  assert service["spec"]["clusterIP"] == "None"
  assert service["spec"]["publishNotReadyAddresses"] is True
  name = job["metadata"]["name"]
  assert service["spec"]["selector"] == {"job-name": name}
  devices = pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
  shape = [
    int(given[f"--config.mesh.num_{n}"]) for n in ("replicas", "data_shards")
  ]
  assert shape[0] * shape[1] == count * devices


def test_pods_have_time_to_save_and_hear_that_they_must(pod):
  assert pod["terminationGracePeriodSeconds"] >= 600
  assert pod["containers"][0]["args"][0].startswith("exec ")
  assert float(flags(pod["containers"][0])["--start_timeout_s"]) > 360


def test_the_secret_of_a_pod_is_its_owners_alone():
  container = yaml.safe_load(blocks("clusters/kubernetes.md")[-1])
  copy, _, run = container["args"][0].partition(" && ")
  target = copy.split()[-1]
  assert copy.startswith("install -m 600 ")
  assert flags(container)["--secret"] == target and run.startswith("exec ")
