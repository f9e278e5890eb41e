"""What an average of the parameters is worth, to `overlap_loco` and AllReduce.

The small sweep's setting at 2000 steps, on the seeds of its results. Runs
without an average to compare with are in docs/results and in
`ablate_gap_seeds`. The last setting is DiLoCoX's own: one fragment, whose
update is a whole round late. This config claims nothing: docs/log.md says what
was found. Cost: 12 runs of two to four minutes each on a core.

    python -m experiments.ablate \
        --config=experiments/configs/ablate_average.py \
        --workdir=runs/ablate_average --processes=2
"""

from experiments.configs import ablate_gap, ablate_gap_seeds, ablate_long
from experiments.configs.overlap_loco import AVERAGE

ROUNDS = {"sync.sync_interval": 16, "sync.num_fragments": 16}
OURS = {"sync.method": "overlap_loco", **ROUNDS, **AVERAGE}
LATE = {
  "sync.method": "delayed",
  "sync.rule": "continue",
  "sync.sync_interval": 16,
  "sync.overlap_steps": 16,
  "codec.name": "int(bits=1)",
  "exchange.error_feedback": True,
  "outer.learning_rate": 1.0,
  "outer.momentum": 0.0,
}


def get_config():
  """Returns all settings on three seeds."""
  config = ablate_long.get_config()
  with config.unlocked():
    config.base.total_steps = 2000
    config.base.evaluation.interval_steps = 200
    config.base.inner.learning_rate = 0.008
    config.seeds = (0, 1, 2)
    adamw = OURS | ablate_gap.NESTEROV | ablate_gap_seeds.ADAMW
    config.runs = [
      {"name": "muon", **OURS},
      {"name": "adamw", **adamw},
      {
        "name": "allreduce, muon",
        "sync.method": "allreduce",
        **AVERAGE,
        "inner.learning_rate": 0.006,
      },
      {
        "name": "one fragment, a round late",
        **(LATE | AVERAGE),
        "inner.learning_rate": 0.0055,
      },
    ]
  return config
