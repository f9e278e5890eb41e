"""When to exchange and how to apply it: H, delay, rule, outer rate, momentum.

Each of them is varied about one setting while the others stay as they are. The
rules are compared once more at the delay of a whole round. This config claims
nothing: its figures show the losses. Cost: 15 runs of about a minute each, 15
to 20 minutes on two CPU cores.

    python -m experiments.sweep \
        --config=experiments/configs/ablate_sync.py \
        --workdir=runs/ablate_sync
"""

from ml_collections import config_dict

from experiments.configs import delayed

AROUND = {
  "sync.sync_interval": (10, 30, 90),
  "sync.overlap_steps": (0, 4, 15, 30),
  "sync.rule": ("continue", "reset", "mix"),
  "outer.learning_rate": (0.5, 0.7, 1.0),
  "outer.momentum": (0.0, 0.3, 0.6, 0.9),
}
AT_A_ROUND = ("reset", "eager")


def get_config():
  """A delay of four steps in rounds of thirty, and what differs from it."""
  config = config_dict.ConfigDict()
  config.base = delayed.get_config()
  config.base.total_steps = 450
  config.base.evaluation.interval_steps = 0
  config.grid = config_dict.ConfigDict()
  config.seeds = (0,)
  config.base.sync.mixing_alpha = 0.5  # Read by the rule "mix" alone.
  config.runs = [
    {},
    *({field: value} for field, values in AROUND.items() for value in values),
    *({"sync.overlap_steps": 30, "sync.rule": rule} for rule in AT_A_ROUND),
  ]
  config.baseline = "base"
  config.lock()
  return config
