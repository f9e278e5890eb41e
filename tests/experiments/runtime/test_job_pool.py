"""Processes of an ablation, with stand-ins that take milliseconds."""

import os
import signal
import sys
import time

import pytest

from experiments.runtime import cores, job_pool

FINAL = '{"kind": "final", "step": 4}'
WRITE = """
import pathlib, sys
run = pathlib.Path(sys.argv[1])
run.mkdir(parents=True, exist_ok=True)
with (run / "metrics.jsonl").open("a") as file:
  print('{"kind": "final", "step": 4}', file=file)
(run / "report.md").touch()
"""


def job(tmp_path, name="a", code=WRITE):
  workdir = tmp_path / "runs" / name
  return job_pool.Job(
    name=name,
    workdir=workdir,
    log=tmp_path / "logs" / f"{name}.log",
    command=[sys.executable, "-c", code, str(workdir)],
    total_steps=4,
  )


def failures(jobs, processes=1):
  found = {}

  def hear(ended, reason):
    if reason:
      found[ended.name] = reason
    return ""

  job_pool.JobPool(jobs, processes, ended=hear).run()
  return found


def test_a_job_is_done_when_its_run_and_its_report_are(tmp_path):
  made = job(tmp_path)
  assert not made.is_done and made.step == 0
  made.workdir.mkdir(parents=True)
  (made.workdir / "metrics.jsonl").write_text('{"kind": "round", "step": 3}\n')
  (made.workdir / "report.md").touch()
  assert not made.is_done and made.step == 3
  assert failures([made]) == {}
  assert made.is_done and made.step == 4
  (made.workdir / "report.md").unlink()
  assert not made.is_done


def test_a_failed_job_is_named_with_its_reason_and_the_rest_go_on(tmp_path):
  broken = {
    "error": "print('step 1'); print('error: too hot'); raise SystemExit(1)",
    "crash": "raise KeyError('lost')",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "silent": "raise SystemExit(3)",
  }
  last = job(tmp_path, "last")
  jobs = [job(tmp_path, name, code) for name, code in broken.items()]
  assert failures([*jobs, last]) == {
    "error": "too hot",
    "crash": "KeyError: 'lost'",
    "killed": "killed by SIGKILL",
    "silent": "exit code 3",
  }
  assert last.is_done
  assert "step 1" in jobs[0].log.read_text()


def test_a_reason_is_of_the_last_attempt(tmp_path):
  failures([job(tmp_path, code="print('error: first'); raise SystemExit(1)")])
  again = job(tmp_path, code="raise SystemExit(3)")
  assert failures([again]) == {"a": "exit code 3"}
  assert "error: first" in again.log.read_text()


def test_as_many_jobs_run_at_once_as_there_are_processes(tmp_path):
  """Each waits for the other, so one after the other would never end."""
  code = """
import pathlib, sys, time
run = pathlib.Path(sys.argv[1])
run.mkdir(parents=True)
other = run.parent / {"a": "b", "b": "a"}[run.name]
end = time.monotonic() + 20
while not other.exists():
  if time.monotonic() > end:
    sys.exit("error: alone")
  time.sleep(0.01)
"""
  jobs = [job(tmp_path, name, code) for name in "ab"]
  assert failures(jobs, processes=2) == {}


def test_one_process_runs_one_job_at_a_time(tmp_path):
  code = """
import pathlib, sys, time
mark = pathlib.Path(sys.argv[1]).parents[1] / "busy"
mark.touch(exist_ok=False)
time.sleep(0.3)
mark.unlink()
"""
  assert failures([job(tmp_path, name, code) for name in "abc"]) == {}


def test_a_run_that_another_process_is_at_waits_for_it(tmp_path, capsys):
  """As when an ablation was killed and its processes were not."""
  slow = job(tmp_path, code="import time; time.sleep(60)")
  left = job_pool._Process(slow, cores.divided(1)[0], dict(os.environ))
  made, other = job(tmp_path), job(tmp_path, "b")
  found = []

  def hear(ended, reason):
    found.append((ended.name, reason, made.workdir.exists()))
    if ended is other:
      left.ask_to_stop()
      left.process.wait()
    return ""

  job_pool.JobPool([made, other], 1, ended=hear).run()
  assert found == [("b", "", False), ("a", "", True)]
  assert capsys.readouterr().out.count("a: another process is still at") == 1


def test_a_deadline_ends_the_wait_for_another_process(tmp_path):
  slow = job(tmp_path, code="import time; time.sleep(60)")
  left = job_pool._Process(slow, cores.divided(1)[0], dict(os.environ))
  made = job_pool.JobPool([job(tmp_path)], 1, deadline_s=time.monotonic() + 1)
  made.run()
  assert made.is_late
  assert not slow.workdir.exists()
  left.ask_to_stop()
  left.process.wait()


def test_processes_end_with_an_interrupted_ablation(tmp_path):
  class Interrupted(job_pool.JobPool):
    def _collect(self):
      raise KeyboardInterrupt

  slow = job(tmp_path, code="import time; time.sleep(60)")
  interrupted = Interrupted([slow], 1)
  with pytest.raises(KeyboardInterrupt):
    interrupted.run()
  (running,) = interrupted._running
  assert running.process.returncode == -signal.SIGTERM


def test_all_jobs_are_asked_to_stop_before_any_is_waited_for(tmp_path):
  # Each ends only when it has seen that the other one was asked, too.
  code = """
import pathlib, signal, sys, time
own = pathlib.Path(sys.argv[1])
own.parent.mkdir(exist_ok=True)
other = own.parent / {"a": "b", "b": "a"}[own.name]
signal.signal(signal.SIGTERM, lambda *_: own.with_suffix(".asked").touch())
own.with_suffix(".ready").touch()
while not other.with_suffix(".asked").exists():
  time.sleep(0.02)
"""

  class Interrupted(job_pool.JobPool):
    def _collect(self):
      while len(list((tmp_path / "runs").glob("*.ready"))) < 2:
        time.sleep(0.02)
      raise KeyboardInterrupt

  jobs = [job(tmp_path, name, code) for name in ("a", "b")]
  interrupted = Interrupted(jobs, 2)
  with pytest.raises(KeyboardInterrupt):
    interrupted.run()
  assert [each.process.returncode for each in interrupted._running] == [0, 0]


def test_the_end_of_every_job_is_told_at_once_with_its_reason(tmp_path, capsys):
  told = []

  def hear(ended, reason):
    told.append((ended.name, reason, (tmp_path / "runs" / "b").exists()))
    return f"heard of {ended.name}"

  broken = job(tmp_path, "a", "print('error: hot'); raise SystemExit(1)")
  job_pool.JobPool([broken, job(tmp_path, "b")], 1, ended=hear).run()
  assert told == [("a", "hot", False), ("b", "", True)]
  printed = capsys.readouterr().out
  assert "run 1 of 2, a: heard of a" in printed and "failed" not in printed


def test_a_deadline_stops_what_runs_and_starts_no_more(tmp_path):
  sleeper = "import sys, time; open(sys.argv[1] + 'x', 'w'); time.sleep(600)"
  jobs = [job(tmp_path, name, sleeper) for name in ("a", "b")]
  (tmp_path / "runs").mkdir()
  made = job_pool.JobPool(jobs, 1, deadline_s=time.monotonic() + 3)
  assert not made.is_late
  made.run()
  assert made.is_late
  started = sorted(path.name for path in (tmp_path / "runs").iterdir())
  assert started == ["ax"]
