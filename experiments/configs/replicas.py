"""More than two replicas, both sides alike, in slices that fit an evening.

Every run has Muon, a warm-up of 50 steps, an average of power 14 and a last
rate of a fifth. The text is divided into three: settings are chosen by `loss`,
results are `judge_loss`, which only the evaluation after the last step reads.
docs/notes/log.md ("What will be compared in slices") says what was fixed before
the runs, and what ends them.

    python -m experiments.sweep --workdir=runs/replicas --max_minutes=60 \
        --config=experiments/configs/replicas.py:tune

The same command goes on where it stopped. `tune` has the runs that choose rates
(eight hours of a core, derived), `main` five seeds at the chosen ones (nine).
`way_back` shows on a small model what rounding a mean costs (a minute a run).
"""

from ml_collections import config_dict

from experiments.configs import overlap_loco
from experiments.configs.convergence import CLOCK_107B

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
  "total_steps": 2000,
}
# Replicas, sequences of each, H and P: the shortest rounds whose bytes all hide
# on the clock of 107B parameters (simulated). Of three steps one hides the
# first message of a reduce-scatter, and two hide the second.
SIZES = (
  (4, 4, 18, 6),
  (2, 4, 16, 16),
  (8, 4, 12, 4),
  (4, 2, 18, 6),
  (8, 1, 12, 4),
)
INNER_RATES = {
  "allreduce": (0.003, 0.004, 0.0055, 0.0075),
  "overlap_loco": (0.004, 0.0057),
}
OUTER_RATES = (1.0, 1.5)
# Inner and outer rate by method, M and sequences: the lowest `loss` of `tune`.
CHOSEN: dict[tuple[str, int, int], tuple[float, float]] = {}


def get_config(part: str = "way_back"):
  """Returns the sweep of one part.

  Args:
    part: Name of the part.
  """
  config = overlap_loco.get_config()
  config.update_from_flattened_dict(COMMON)
  sweep = {"way_back": _way_back, "tune": _tune, "main": _main}[part]()
  return config_dict.ConfigDict({"base": config.to_dict(), **sweep})


def _allreduce(replicas: int, sequences: int, inner: float) -> dict:
  """One setting of the baseline, whose batch all replicas share."""
  return {
    "name": f"allreduce {replicas}x{sequences}, {inner:g}",
    "sync.method": "allreduce",
    "mesh.num_replicas": replicas,
    "data.batch_size": sequences,
    "inner.learning_rate": inner,
  }


def _overlap(size: tuple, inner: float, outer: float) -> dict:
  """One setting of `overlap_loco`."""
  replicas, sequences, interval, fragments = size
  return {
    "name": f"overlap_loco {replicas}x{sequences}, {inner:g}, outer {outer:g}",
    "sync.method": "overlap_loco",
    "sync.sync_interval": interval,
    "sync.num_fragments": fragments,
    "mesh.num_replicas": replicas,
    "data.batch_size": sequences,
    "inner.learning_rate": inner,
    "outer.learning_rate": outer,
  }


def _settings(size: tuple) -> list[dict]:
  """As many settings to tune for the baseline as for the method."""
  method = [
    _overlap(size, inner, outer)
    for outer in OUTER_RATES
    for inner in INNER_RATES["overlap_loco"]
  ]
  if size[1] < 4:  # The batch of eight has its baseline already.
    return method
  return method + [
    _allreduce(size[0], size[1], r) for r in INNER_RATES["allreduce"]
  ]


def _tune() -> dict:
  """Rates for every size, on a seed that is in no result."""
  runs = [run for size in SIZES for run in _settings(size)]
  return {"runs": runs, "seeds": (1000,)}


def _main() -> dict:
  """Five seeds at what was chosen, compared on the text that judges."""
  runs, baselines = [], {}
  for size in SIZES:
    # The batch of eight has one baseline, that of two replicas.
    base = size[:2] if size[1] == 4 else (2, 4)
    own = CHOSEN.get(("overlap_loco", size[0], size[1]))
    other = CHOSEN.get(("allreduce", base[0], base[1]))
    if own and other:
      name = f"overlap_loco {size[0]}x{size[1]}"
      baselines[name] = f"allreduce {base[0]}x{base[1]}"
      runs.append({**_allreduce(*base, other[0]), "name": baselines[name]})
      runs.append({**_overlap(size, *own), "name": name})
  return {
    "runs": runs,
    "seeds": (0, 1, 2, 3, 4),
    "baselines": baselines,
    "clocks": (CLOCK_107B,),
    "judged": True,
  }


def _way_back() -> dict:
  """What an exchange of one bit loses on four replicas, by its collective."""
  shared = {
    **_overlap((4, 4, 16, 8), 0.016, 1.0),
    "model.preset": "nano",
    "total_steps": 1000,
  }
  fp32 = {"exchange.codec": "float32", "exchange.feedback": 0.0}
  runs = [
    {**shared, "name": "fp32", **fp32},
    {**shared, "name": "gathered", "exchange.collective": "all_gather"},
    {**shared, "name": "scattered", "exchange.collective": "reduce_scatter"},
  ]
  return {"runs": runs, "seeds": (1000, 1001, 1002), "baseline": "fp32"}
