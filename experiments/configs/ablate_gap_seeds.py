"""`overlap_loco` at the length of the small sweep, on its three seeds.

The settings are the best of `ablate_gap`, which was run on another seed. The
runs of AllReduce to compare with are in docs/results. This config claims
nothing: docs/log.md says what was found. Cost: 6 runs of six to eight minutes
each on a core.

    python -m experiments.ablate \
        --config=experiments/configs/ablate_gap_seeds.py \
        --workdir=runs/ablate_gap_seeds --processes=2
"""

from experiments.configs import ablate_gap

ADAMW = {
  "inner.optimizer": "adamw",
  "inner.learning_rate": 0.002,
  "inner.warmup_steps": 200,
}


def get_config():
  """Returns 16 slices with Muon and with AdamW inside."""
  config = ablate_gap.get_config()
  with config.unlocked():
    config.base.total_steps = 2000
    config.seeds = (0, 1, 2)
    config.runs = [
      {"name": "muon", **ablate_gap.SLICED, **ablate_gap.INNER_008},
      {"name": "adamw", **ablate_gap.SLICED, **ADAMW, **ablate_gap.NESTEROV},
    ]
  return config
