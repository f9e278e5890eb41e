import math
import pathlib

import numpy as np
import pytest

from dilocox_jax import metrics

FRAGMENT_BYTES = 3_484_672


def write_run(
  workdir,
  method="diloco",
  num_replicas=2,
  num_fragments=1,
  num_steps=600,
  interval=30,
  warm_steps=0,
  floor=1.9,
  digest="9f3a61c2d07e",
  held_out="51d0",
  finish=True,
):
  """Writes made-up rows that look like a run's."""
  rng = np.random.default_rng(len(method) + num_replicas)
  metrics.write_run_record(
    workdir,
    config={
      "data": {"source": "stdlib", "sequence_length": 128, "batch": 8},
      "sync": {"sync_interval": interval, "num_fragments": num_fragments},
      "outer": {"name": "nesterov", "learning_rate": 0.7},
      "seed": 0,
    },
    method=method,
    num_replicas=num_replicas,
    parameter_count=871_168,
    corpus_name="python-stdlib",
    corpus_digest=digest,
    held_out_digest=held_out,
    platform="cpu x 1",
  )
  tokens_a_step = num_replicas * 8 * 128
  total = 0
  exchange = FRAGMENT_BYTES * 2 * (num_replicas - 1) // num_replicas

  def outer_loss(step):
    return floor + 3.6 * math.exp(-step / 90)

  def losses(step):
    outer = outer_loss(step)
    return {
      "outer_loss": outer,
      "mean_loss": outer + 0.02,
      "replica_loss": outer + 0.06,
    }

  with metrics.Recorder(workdir) as recorder:
    recorder.record_timing(step=0, event="compile", wall_s=11.5)
    for step in range(interval, num_steps + 1, interval):
      warm = step <= warm_steps
      synced = warm or method == "allreduce"
      sent = exchange * interval if synced else exchange
      sent *= num_replicas > 1
      total += sent
      noise = 0.03 * rng.standard_normal(num_replicas)
      each = outer_loss(step) - 0.05 + noise
      drift = [
        {
          "fragment": p,
          "step": step - interval + (p + 1) * interval // num_fragments,
          "cosine": 0.75
          - 0.5 * step / num_steps
          + 0.03 * rng.normal()
          - 0.1 * p,
          "disagreement": (1 + p) * 0.9 * math.exp(-step / 500),
          "pseudo_gradient_norm": 1.1,
        }
        for p in range(num_fragments)
        if num_replicas > 1 and not synced
      ]
      recorder.record_round(
        step=step,
        tokens=step * tokens_a_step,
        phase="data_parallel" if synced else "rounds",
        loss=np.float32(each.mean()),
        loss_per_replica=each,
        grad_norm=0.8,
        learning_rate=2e-3,
        sent_bytes=sent,
        total_sent_bytes=total,
        drift=drift,
      )
      recorder.record_timing(
        step=step, event="round", wall_s=2.5, tokens_per_s=12_288.0
      )
      if step % (2 * interval) == 0 and step < num_steps:
        recorder.record_evaluation(
          step=step,
          tokens=step * tokens_a_step,
          total_sent_bytes=total,
          **losses(step),  # pyright: ignore[reportArgumentType]
        )
        recorder.record_timing(step=step, event="evaluation", wall_s=0.75)
    if finish:
      recorder.record_evaluation(
        step=num_steps,
        tokens=num_steps * tokens_a_step,
        total_sent_bytes=total + exchange * (num_replicas > 1),
        num_steps=num_steps,
        **losses(num_steps),
      )
  return pathlib.Path(workdir)


@pytest.fixture(name="write_run")
def write_run_fixture():
  return write_run
