"""Scripts that only docs/clusters/ has; the others are in examples/."""

import os
import pathlib
import re
import subprocess
import textwrap

import pytest
import yaml

from experiments.runtime.command_line import TRY_AGAIN
from tests import slurm_script

DOCS = pathlib.Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"(?:^    .*\n|^\n(?=    ))+", re.MULTILINE)


def blocks(page):
  """The indented blocks of a page, without their indentation."""
  text = (DOCS / page).read_text()
  return [textwrap.dedent(block) for block in BLOCK.findall(text)]


# Slurm.

(ARRAY,) = [
  block for block in blocks("clusters/slurm.md") if "#SBATCH" in block
]
# Codes after which the same command continues the run:
# docs/clusters/failures.md.
CONTINUED = (TRY_AGAIN, 134, 137, 143)


def submit(script, folder, code, restarts):
  """Runs a script as Slurm does; returns it and whether it was requeued."""
  ended, requeued = slurm_script.submit(
    script,
    folder,
    code=code,
    restarts=restarts or None,
    environ={"SLURM_ARRAY_TASK_ID": "3"},
  )
  assert requeued in ("", "requeue 7\n")
  return ended, bool(requeued)


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
  code, restarts, is_requeued, tmp_path
):
  assert submit(ARRAY, tmp_path, code, restarts) == (code, is_requeued)
  assert "experiments.train" in (tmp_path / "srun.out").read_text()


def test_a_job_is_warned_before_its_time_limit_and_may_be_requeued():
  options = " ".join(
    line.removeprefix("#SBATCH ")
    for line in ARRAY.splitlines()
    if line.startswith("#SBATCH ")
  ).split()
  assert "--signal=TERM@600" in options and "--requeue" in options


(SECOND,) = [
  block for block in blocks("clusters/slurm.md") if "SLURM_PROCID" in block
]


def test_each_task_of_a_second_cluster_has_a_number_of_its_own(tmp_path):
  # Slurm's variables have the values of a task only in the task.
  for name, text in (
    ("srun", 'while [ "$1" != bash ]; do shift; done; TASK "$@"'),
    ("python", 'echo "$JAX_LOCAL_DEVICE_IDS $@"'),
  ):
    text = text.replace("TASK", "SLURM_LOCALID=3 SLURM_PROCID=11")
    program = tmp_path / name
    program.write_text(f"#!/bin/bash\n{text}\n")
    program.chmod(0o755)
  environment = {
    "PATH": f"{tmp_path}:{os.environ['PATH']}",
    "SLURM_LOCALID": "0",
    "SLURM_PROCID": "0",
  }
  done = subprocess.run(
    ["bash", "-c", SECOND], env=environment, capture_output=True, text=True
  )
  device, *words = done.stdout.split()
  assert device == "3" and "--process_id=27" in words
  assert "--config.sync.method=diloco" in words


# Kubernetes.


def flags(container):
  """The flags of a container's command."""
  words = " ".join(container["args"]).split()
  pairs = (word.split("=", 1) for word in words if "=" in word)
  return dict(pairs)


def test_the_secret_of_a_pod_is_its_owners_alone():
  container = yaml.safe_load(blocks("clusters/kubernetes.md")[-1])
  copy, _, run = container["args"][0].partition(" && ")
  target = copy.split()[-1]
  assert copy.startswith("install -m 600 ")
  assert flags(container)["--secret"] == target and run.startswith("exec ")
