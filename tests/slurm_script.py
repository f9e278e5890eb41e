"""Runs a batch script as Slurm does. The programs only note their calls."""

import os
import subprocess


def submit(script, folder, *, code, restarts, arguments=(), environ=None):
  """Runs a batch script whose `srun` ends with an exit code.

  Args:
    script: Text of the script.
    folder: Empty folder in which it runs.
    code: Exit code of `srun`.
    restarts: How often Slurm has restarted the job; None: never.
    arguments: Arguments of the script.
    environ: More variables of the environment.

  Returns:
    Exit code of the script, and the line with the arguments of `scontrol`;
    "": no call.
  """
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
    **(environ or {}),
  }
  if restarts is not None:
    environment["SLURM_RESTART_COUNT"] = str(restarts)
  done = subprocess.run(
    ["bash", "-c", script, "script", *arguments], cwd=folder, env=environment
  )
  requeued = folder / "scontrol.out"
  if not requeued.exists():
    return done.returncode, ""
  return done.returncode, requeued.read_text()
