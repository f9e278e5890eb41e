"""AllReduce and `overlap_loco` at 20 tokens a parameter, on the small model.

The model `tiny` has 0.86 million parameters, so a run takes 17,000 steps of
1,024 tokens. A cold start that is a large share of 2000 steps is a small one
here. The inner rates are those of 2000 steps, and for Muon lower ones too,
since a longer run may want a lower rate. This config claims nothing:
docs/log.md says what was found. Cost: about half an hour a run on a core.

    python -m experiments.ablate --config=experiments/configs/ablate_long.py \
        --workdir=runs/ablate_long --processes=2
"""

from experiments.configs import ablate_gap, convergence_small
from experiments.configs.overlap_loco import AVERAGE

OVERLAP = {"sync.method": "overlap_loco"}
ALLREDUCE = {"sync.method": "allreduce"}
ADAMW = {"inner.optimizer": "adamw", "inner.warmup_steps": 200}


def get_config():
  """Both methods with Muon at several inner rates, and with AdamW."""
  config = ablate_gap.get_config()
  with config.unlocked():
    config.base = base = convergence_small.get_config().base
    base.total_steps = 17_000
    base.evaluation.interval_steps = 1000
    base.checkpoint.interval_steps = 2000
    base.inner.optimizer = "muon"
    base.inner.warmup_steps = 50
    config.seeds = (0,)
    config.runs = [
      {"name": "allreduce, muon", **ALLREDUCE, "inner.learning_rate": 0.006},
      {"name": "muon", **OVERLAP, "inner.learning_rate": 0.008},
      {
        "name": "allreduce, adamw",
        **(ALLREDUCE | ADAMW),
        "inner.learning_rate": 0.0026,
      },
      {
        "name": "adamw",
        **(OVERLAP | ADAMW | ablate_gap.NESTEROV),
        "inner.learning_rate": 0.002,
      },
      {
        "name": "allreduce, muon, rate 0.004",
        **ALLREDUCE,
        "inner.learning_rate": 0.004,
      },
      {
        "name": "muon, rate 0.0055",
        **OVERLAP,
        "inner.learning_rate": 0.0055,
      },
      {
        "name": "muon, rate 0.0055, H = 2",
        **OVERLAP,
        "sync.sync_interval": 2,
        "sync.num_fragments": 2,
        "inner.learning_rate": 0.0055,
      },
      {
        "name": "muon, rate 0.004",
        **OVERLAP,
        "inner.learning_rate": 0.004,
      },
      {
        "name": "allreduce, muon, rate 0.0028",
        **ALLREDUCE,
        "inner.learning_rate": 0.0028,
      },
      {
        "name": "muon, rate 0.0028",
        **OVERLAP,
        "inner.learning_rate": 0.0028,
      },
      {
        "name": "muon, rate 0.004, average",
        **(OVERLAP | AVERAGE),
        "inner.learning_rate": 0.004,
      },
      {
        "name": "muon, rate 0.004, average, last rate 0.1",
        **OVERLAP,
        "outer.average_power": 10.0,
        "inner.final_fraction": 0.1,
        "inner.learning_rate": 0.004,
      },
    ]
  return config
