"""Processes of a sweep: how many, what they say, and how they are stopped."""

import importlib.util
import math
import sys
import time

import pytest

from experiments.runtime.command_line import UsageError
from experiments.sweeps.pool import Job, Pool

HAS_SUBMITIT = importlib.util.find_spec("submitit") is not None


def job(folder, name, code):
  return Job(name, folder / f"{name}.log", [sys.executable, "-c", code])


def ended(pool, jobs):
  reasons = {}
  pool.run(jobs, reasons.__setitem__)
  return {jobs[number].name: reason for number, reason in reasons.items()}


FAILS = "import sys; print('error: no text', file=sys.stderr); sys.exit(2)"
CODES = {
  "works": "print('fine')",
  "fails": FAILS,
  "crashes": "1 / 0",
  "dies": "import os; os.kill(os.getpid(), 9)",
}


def test_every_job_ends_and_says_in_one_line_why_it_failed(tmp_path):
  jobs = [job(tmp_path, name, code) for name, code in CODES.items()]
  assert ended(Pool(2), jobs) == {
    "works": "",
    "fails": "no text",
    "crashes": "ZeroDivisionError: division by zero",
    "dies": "killed by SIGKILL",
  }
  assert "fine" in jobs[0].log.read_text()


def test_only_so_many_run_at_once_and_they_share_the_threads(tmp_path):
  code = (
    "import os, time; print(time.time(), os.environ['NPROC']);"
    " time.sleep(.3); print(time.time())"
  )
  jobs = [job(tmp_path, f"job{number}", code) for number in range(4)]
  assert set(ended(Pool(2), jobs).values()) == {""}
  times = [each.log.read_text().split() for each in jobs]
  starts = sorted(float(start) for start, *_ in times)
  ends = sorted(float(end) for *_, end in times)
  # The third begins when one of the first two has ended.
  assert starts[2] >= ends[0] and starts[3] >= ends[1]


def test_what_runs_when_time_is_over_is_asked_to_stop(tmp_path):
  code = "import time; time.sleep(60)"
  pool = Pool(1, deadline_s=time.monotonic() + 0.5)
  started_s = time.monotonic()
  assert ended(pool, [job(tmp_path, "long", code)] * 2) == {}
  assert pool.is_late and time.monotonic() - started_s < 20


def test_an_error_of_the_caller_stops_all(tmp_path):
  def fail(number, reason):
    raise KeyboardInterrupt

  jobs = [job(tmp_path, "quick", "pass")]
  jobs.append(job(tmp_path, "long", "import time; time.sleep(60)"))
  started_s = time.monotonic()
  with pytest.raises(KeyboardInterrupt):
    Pool(2, deadline_s=math.inf).run(jobs, fail)
  assert time.monotonic() - started_s < 20


@pytest.mark.skipif(HAS_SUBMITIT, reason="submitit is there")
def test_a_missing_submitit_is_one_line():
  with pytest.raises(UsageError, match=r"pip install 'dilocox_jax\[slurm\]'"):
    Pool(1, slurm="slurm_partition=gpu")


@pytest.mark.skipif(not HAS_SUBMITIT, reason="needs the extra `slurm`")
def test_jobs_run_by_submitit_end_alike(tmp_path):
  pool = Pool(2, slurm=f"cluster=local,folder={tmp_path},timeout_min=2")
  jobs = [job(tmp_path, name, CODES[name]) for name in ("works", "fails")]
  found = ended(pool, jobs)
  assert found["works"] == "" and "no text" in found["fails"]
  assert "fine" in jobs[0].log.read_text()
