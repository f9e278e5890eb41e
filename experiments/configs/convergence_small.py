"""Every method under one budget: about a million parameters, 2000 steps.

Claim: none; the report says which published orderings hold. H = 25 divides
2000, and so does OpenDiLoCo's 500, so every run at equal tokens ends with a
whole round. A step is stated as 30 ms: a replica with two CPU cores of its own
takes 32 ms (measured). Cost: 11 tuning runs of 1000 steps and 3 results of 2000
a method, and shorter ones at equal time. A run of 2000 took 4 to 9 minutes with
two at once on two CPU cores (measured; docs/log.md).

    python -m experiments.convergence \
        --config=experiments/configs/convergence_small.py \
        --workdir=runs/convergence_small --processes=2
"""

from ml_collections import config_dict

from experiments.configs import default
from experiments.sweeps import method_list as methods

# The largest model of the papers, on links of the same speed.
CLOCK_107B = {
  "name": "107b",
  "cluster": "dilocox_107b",
  "model": {"preset": "qwen_107b"},
  "data": {"batch_size": 8, "sequence_length": 2048},
  "codec": {"rank": 2048},
}

# Notes for every sweep of these methods, whatever its model.
ON_RULES = (
  "`continue` and `reset` are the two readings of DiLoCoX's rule for what comes"
  " late: added to one's own progress, or put in its place. `ours` is"
  " `continue` with tau no longer than the transfer takes, and H about twice"
  " that."
)
ON_CURVES = (
  "Curves are those of the schedule at equal tokens. Runs at equal time have a"
  " schedule that ends there, and do not end where a curve crosses that time."
)
ON_NAMES = (
  "A name that ends with a clock has the shortest H behind which an exchange of"
  " DiLoCoX hides on it. `diloco_cold` is DiLoCo without its warm start."
)
# Notes for this sweep alone.
NOTES = (
  ON_RULES,
  ON_NAMES,
  "Codecs take no time on the clocks, which favours those that compress. On"
  " `1gbit` latency (40 ms) outweighs the bytes of so small a model: it shows"
  " what hiding is worth, and `107b` what compressing is.",
  ON_CURVES,
  "Batch, DiLoCoX's rule for H, warm start and target loss were chosen after a"
  " look at runs of seed 0; rates, warm-ups and momenta on the seed of tuning"
  " alone.",
)


def get_config():
  """Returns all methods on two replicas of `tiny`."""
  config = config_dict.ConfigDict()
  config.base = base = default.get_config()
  base.total_steps = 2000
  base.data.batch_size = 4
  base.inner.warmup_steps = 100
  base.evaluation.interval_steps = 100
  base.evaluation.num_sequences = 512
  base.checkpoint.interval_steps = 500
  base.checkpoint.keep = 1
  clocks = ("1gbit", "107b")
  config.methods = methods.every(25, 500, 300, clocks)
  config.tuning = config_dict.ConfigDict(
    {
      "seed": 1000,
      "total_steps": 1000,
      "inner_learning_rates": (5e-4, 1e-3, 2e-3, 3.5e-3, 6e-3, 1e-2),
    }
  )
  config.seeds = (0, 1, 2)
  config.clusters = [
    {"name": "1gbit", "cluster": "1gbit", "step_s": 0.03},
    CLOCK_107B,
  ]
  config.target_loss = 1.5
  config.equal_time = methods.contests(clocks)
  config.claims = methods.claims(*clocks)
  config.gaps = {"diloco": 0.012, "diloco_cold": 0.012}
  config.notes = NOTES
  config.lock()
  return config
