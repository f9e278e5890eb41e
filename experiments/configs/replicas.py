"""More than two replicas, both sides alike, in parts that each fit an evening.

Every run has Muon, a warm-up of 50 steps, an average of power 14 and a last
rate of a fifth. The text is divided into three: settings are chosen by `loss`,
and `judge_loss`, which only the evaluation after the last step reads, is what
results are. docs/log.md ("What will be compared in slices on two cores") says
what decides, and what ends each trial.

    python -m experiments.sweep --workdir=runs/replicas --max_minutes=60 \
        --config=experiments/configs/replicas.py:screen

Parts: `screen` (98 thousand parameters, one seed: which trials deserve more).
"""

from ml_collections import config_dict

from experiments.configs import overlap_loco

# A 98 thousand parameter model: a run of 1000 steps takes about 2 minutes.
MINI = {"model.model_dim": 40, "model.ff_dim": 108}
COMMON = {
  "model.compute_dtype": "float32",
  "model.scan_unroll": 0,
  "mesh.stacked_by": "map",
  "data.judge_fraction": 0.5,
  "data.batch_size": 4,
  "evaluation.num_sequences": 512,
  "evaluation.interval_steps": 0,
  "inner.optimizer": "muon",
  "inner.warmup_steps": 50,
}
ALLREDUCE = {"sync.method": "allreduce"}
OVERLAP = {
  "sync.method": "overlap_loco",
  "sync.num_fragments": 16,
  "exchange.collective": "all_gather",
}


def get_config(part: str = "screen"):
  """Returns the sweep of one part.

  Args:
    part: Name of the part.
  """
  config = overlap_loco.get_config()
  config.update_from_flattened_dict(COMMON)
  return PARTS[part](config.to_dict())


def _screen(base: dict) -> config_dict.ConfigDict:
  """Rates by M first: four replicas with four sequences each."""
  shared = {"mesh.num_replicas": 4, "total_steps": 1000, **MINI}
  runs = [
    {"name": f"allreduce, {rate:g}", "inner.learning_rate": rate, **ALLREDUCE}
    for rate in (0.016, 0.008, 0.032)
  ]
  runs += [
    {
      "name": f"overlap_loco, {rate:g}, outer {outer:g}",
      "inner.learning_rate": rate,
      "outer.learning_rate": outer,
      **OVERLAP,
    }
    for outer in (1.0, 1.5, 2.1)
    for rate in (0.016, 0.008, 0.0113)
  ]
  return config_dict.ConfigDict(
    {"base": base, "runs": [{**shared, **run} for run in runs], "seeds": (1000,)}
  )


PARTS = {"screen": _screen}
