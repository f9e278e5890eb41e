"""A sweep of the nano model, and runs of it that take no time."""

import pathlib
import types

from dilocox_jax import metrics
from dilocox_jax.config import RunConfig
from experiments.configs import convergence_small
from experiments.runtime import job_pool
from experiments.sweeps import method_list, sweep_spec
from experiments.sweeps.required_runs import TASKS, RequiredRuns

NAMES = ("allreduce", "diloco", "dilocox_continue", "ours_1gbit")
TEXT = "feedfacefeedface"
ALIKE = {"at": "tokens", "source": "all papers"}  # A claim.


def values(**changed):
  """The plain values of a sweep of four methods."""
  config = convergence_small.get_config().to_dict()
  base = config["base"]
  base["total_steps"] = 48
  base["data"] |= {
    "source": "synthetic",
    "batch_size": 2,
    "sequence_length": 16,
  }
  base["model"] |= {"preset": "nano", "scan_unroll": 1}
  base["inner"]["warmup_steps"] = 2
  base["sync"]["steps_per_dispatch"] = 6
  base["evaluation"] = {"interval_steps": 12, "num_sequences": 4}
  config["methods"] = _methods()
  config["tuning"] |= {
    "total_steps": 12,
    "inner_learning_rates": (1e-3, 3e-3, 9e-3),
  }
  config["seeds"] = (0, 1)
  config["clusters"] = clocks("1gbit", 0.3)
  config["equal_time"] = [
    {"clock": clock, "reference": "dilocox_continue", "methods": NAMES}
    for clock in ("1gbit", "107b")
  ]
  config["gaps"] = {"diloco": 0.012}
  config["claims"] = [
    {"better": "allreduce", "than": ("diloco",), **ALIKE},
    {
      "better": "dilocox_continue",
      "than": ("allreduce",),
      "at": "1gbit",
      "source": "ours",
    },
  ]
  return config | changed


def clocks(cluster, step_s):
  """A cluster's, named '1gbit' whatever it is, and that of the large model."""
  near = {"name": "1gbit", "cluster": cluster, "step_s": step_s}
  return [near, convergence_small.CLOCK_107B]


def _methods():
  at = {"sync.sync_interval": 6}
  keeps = {"sync.rule": "continue"}
  return [
    method_list.of("allreduce"),
    method_list.of("diloco", changed=at),
    method_list.of("dilocox", "dilocox_continue", changed=at | keeps),
    method_list.ours("1gbit"),
  ]


def sweep(**changed):
  return sweep_spec.sweep(values(**changed))


def loss_of(run) -> float:
  """A made loss: lowest at a rate of 3e-3 and a momentum of 0.3."""
  inner, outer = run.config.inner, run.config.outer
  rate = abs(inner.learning_rate - 3e-3)
  warmup = 0.001 * run.config.inner.warmup_steps
  momentum = abs(outer.momentum - 0.3)
  return 2.0 + 10 * rate + momentum + warmup + 0.01 * run.config.seed


def required(loss_of=loss_of, **changed):
  return RequiredRuns(sweep(**changed), loss_of)


def runs_of(task, all_runs):
  """The runs of a task, of all methods."""
  methods = all_runs.sweep.methods
  return [run for method in methods for run in all_runs.of_task(task, method)]


def make_all(all_runs, maker) -> None:
  """Makes every run of a sweep, task by task."""
  for task in TASKS:
    assert not maker.make(runs_of(task, all_runs), 1, float("inf"))
    assert maker.failures == []


def write_run(job, config: RunConfig, loss: float) -> None:
  """What `experiments.train` leaves behind, with a made loss."""
  metrics.write_run_record(
    job.workdir,
    config=config.to_mapping(),
    method=config.sync.method,
    num_replicas=2,
    parameter_count=1,
    corpus_name="synthetic",
    corpus_digest=TEXT,
    held_out_digest=TEXT,
    platform="cpu x 1",
  )
  (job.workdir / "checkpoints").mkdir()
  (job.workdir / "report.md").touch()
  steps, every = config.total_steps, config.evaluation.interval_steps
  with metrics.Recorder(job.workdir) as recorder:
    for step in range(every, steps, every) if every else ():
      recorder.record_evaluation(**_row(step, loss + 1 / step))
    recorder.record_evaluation(**_row(steps, loss), num_steps=steps)


def _row(step, loss):
  return {
    "step": step,
    "tokens": 64 * step,
    "total_sent_bytes": 100 * step,
    "outer_loss": loss,
    "mean_loss": loss,
    "replica_loss": loss,
  }


class MadeBatch:
  """Stands for `JobPool`: jobs end at once, or the process is killed."""

  made: list[pathlib.Path] = []
  kill_after = 10**9
  configs: dict[pathlib.Path, RunConfig] = {}

  def __init__(self, jobs, processes, *, ended, deadline_s):
    self.jobs, self.ended, self.is_late = jobs, ended, False

  def run(self):
    for job in self.jobs:
      if len(self.made) >= self.kill_after:
        raise KeyboardInterrupt
      config = self.configs[job.workdir]
      write_run(job, config, loss_of(types.SimpleNamespace(config=config)))
      self.made.append(job.workdir)
      self.ended(job, "")
    return {}


def stand_in(monkeypatch, kill_after=10**9):
  """Puts `MadeBatch` in place; gives what it made, in order."""
  from experiments.sweeps import run_maker

  made = type(
    "Made", (MadeBatch,), {"made": [], "configs": {}, "kill_after": kill_after}
  )
  monkeypatch.setattr(run_maker.job_pool, "JobPool", made)
  monkeypatch.setattr(run_maker, "corpus_digest", lambda config: TEXT)
  job_of = run_maker.RunMaker.job

  def remember(self, run) -> job_pool.Job:
    job = job_of(self, run)
    made.configs[job.workdir] = run.config
    return job

  monkeypatch.setattr(run_maker.RunMaker, "job", remember)
  return made.made
