import math
import pathlib

import numpy as np
import pytest

from dilocox_jax.metrics.recorder import Recorder
from dilocox_jax.metrics.work_directory import write_run_record
from dilocox_jax.report import load_run, write_report

FRAGMENT_BYTES = 3_484_672
CONFIG = {
  "data": {"source": "stdlib", "sequence_length": 128, "batch": 8},
  "sync": {"sync_interval": 30, "num_fragments": 1},
  "exchange": {"codec": "low_rank(rank=16)+int"},
  "seed": 0,
}
RECORD = {
  "parameter_count": 871_168,
  "corpus_name": "python-stdlib",
  "bytes_per_token": None,
}
START = {"platform": "cpu x 1", "command": None, "chosen_for_device": {}}


def write_run(
  workdir,
  method="diloco",
  num_replicas=2,
  num_fragments=1,
  num_steps=600,
  warm_steps=0,
  floor=1.9,
  digest="9f3a61c2d07e",
  held_out="51d0",
  finish=True,
  collective="auto",
  seconds_a_step=math.nan,
  **record,
):
  """Writes made-up rows that look like a run's, in rounds of 30 steps."""
  rng = np.random.default_rng(len(method) + num_replicas)
  record |= {"method": method, "num_replicas": num_replicas}
  digests = {"corpus_digest": digest, "held_out_digest": held_out}
  run = RECORD | digests | record
  start = {name: run.pop(name, value) for name, value in START.items()}
  exchange_fields = CONFIG["exchange"] | {"collective": collective}
  config = CONFIG | {"exchange": exchange_fields}
  write_run_record(workdir, config, run, start)
  exchange = FRAGMENT_BYTES * 2 * (num_replicas - 1) // num_replicas

  def evaluation(step, flush=0, **more):
    outer = floor + 3.6 * math.exp(-step / 90)
    return more | {
      "step": step,
      "tokens": step * num_replicas * 1024,
      "total_sent_bytes": total + flush,
      "outer_loss": outer,
      "mean_loss": outer + 0.02,
      "replica_loss": outer + 0.06,
    }

  def drift(step, p):
    return {
      "fragment": p,
      "step": step - 30 + (p + 1) * 30 // num_fragments,
      "cosine": 0.75 - 0.5 * step / num_steps - 0.01 * p,
      "disagreement": (1 + p) * 0.9 * math.exp(-step / 500),
      "pseudo_gradient_norm": 1.1,
      **{"rank": 16.0 - step / 100, "energy_rank": 9.0},
    }

  total = 0
  recorder = Recorder(workdir)
  recorder.record_timing(step=0, event="compile", wall_s=11.5)
  for step in range(30, num_steps + 1, 30):
    synced = step <= warm_steps or method == "allreduce"
    sent = exchange * (30 if synced else 1) * (num_replicas > 1)
    total += sent
    each = floor + 3.6 * math.exp(-step / 90) + rng.normal(size=num_replicas)
    measured = range(num_fragments) if num_replicas > 1 and not synced else ()
    recorder.record_round(
      step=step,
      tokens=step * num_replicas * 1024,
      phase="data_parallel" if synced else "rounds",
      loss=500.0 if step == 30 else each.mean(),
      loss_per_replica=each,
      grad_norm=0.8,
      learning_rate=2e-3,
      sent_bytes=sent,
      total_sent_bytes=total,
      drift=[drift(step, p) for p in measured],
    )
    timing = {"step": step, "simulated_s": step * seconds_a_step}
    recorder.record_timing(
      step=step, event="round", wall_s=2.5, tokens_per_s=12_288.0
    )
    if step % 60 == 0:
      if step < num_steps:
        recorder.record_evaluation(**evaluation(step))
      recorder.record_timing(event="evaluation", wall_s=0.75, **timing)
  if finish:
    flush = exchange * (num_replicas > 1)
    final = evaluation(num_steps, flush, num_steps=num_steps)
    recorder.record_evaluation(**final)
  return pathlib.Path(workdir)


@pytest.fixture(name="write_run", scope="session")
def write_run_fixture():
  return write_run


@pytest.fixture(scope="session")
def workdir(tmp_path_factory):
  """A finished run with a warm start and a clock, and its report."""
  path = tmp_path_factory.mktemp("report") / "a"
  clock = {"clock": "cluster 1gbit", "seconds_a_step": 10.0}
  write_run(path, warm_steps=150, bytes_per_token=2.0, **clock)
  write_report(path)
  return path


@pytest.fixture(scope="session")
def run(workdir):
  return load_run(workdir)
