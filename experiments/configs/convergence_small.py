"""Every method under one budget: about a million parameters, 2000 steps.

This config claims nothing itself: its report says which published orderings
hold. H = 25 and OpenDiLoCo's H = 500 both divide 2000, so every run at equal
tokens ends with a whole round. A step is stated as 30 ms: a replica that has
two CPU cores takes 32 ms (measured). Cost: for every method 11 tuning runs of
1000 steps, 3 results of 2000 steps, and shorter runs at equal time. A run of
2000 steps took 4 to 14 minutes with two at once on two CPU cores (measured;
docs/log.md). The finished runs are in docs/results.

    python -m experiments.convergence \
        --config=experiments/configs/convergence_small.py \
        --workdir=runs/convergence_small --processes=2
"""

from ml_collections import config_dict

from experiments.configs import default
from experiments.sweeps import method_list as methods

CLOCKS = ("1gbit", "107b")
# The largest model of the papers, on links that are as slow as theirs.
CLOCK_107B = {
  "name": "107b",
  "cluster": "dilocox_107b",
  "model": {"preset": "qwen_107b"},
  "data": {"batch_size": 8, "sequence_length": 2048},
  "codec": {"rank": 2048},
}

# Settings of AllReduce with an average, whose tuning was not finished: the best
# of the rates that were tried, and the warm-up that is best without an average.
AVERAGE = "allreduce_muon_average"
GIVEN = {"inner.learning_rate": 0.006, "inner.warmup_steps": 50}

# Notes that hold for every sweep of these methods, whatever its model.
ON_READINGS = (
  "DiLoCoX applies a pseudo-gradient late. `continue` and `reset` are the two"
  " readings of its rule: the late update is added to a replica's own progress,"
  " or it replaces that progress."
)
ON_RULES = (
  f"{ON_READINGS} `ours` is `continue` with a tau no longer"
  " than the transfer takes, and an H of about twice tau."
)
ON_CURVES = (
  "Curves show the runs at equal tokens. Runs at equal time have a"
  " learning-rate schedule of their own that ends at that time, so they do not"
  " end where a curve crosses it."
)
ON_NAMES = (
  "A method whose name ends with a clock has the shortest H that divides the"
  " steps and hides an exchange of DiLoCoX on that clock. `diloco_cold` is"
  " DiLoCo without its warm start."
)
ON_SEED_0 = (
  "The batch size, DiLoCoX's rule for H, the target loss, and the average of"
  " `overlap_loco` with its last learning rate were chosen after looking at"
  " runs of seed 0, which is one of the results. Other learning rates, warm-ups"
  " and momenta were chosen on the seed of tuning only."
)
ON_AVERAGE = (
  "`allreduce_muon_average` is AllReduce with the average and the last learning"
  " rate of `overlap_loco`, and so the baseline of a method that keeps an"
  " average. It took part in this sweep and was taken out after six of its 11"
  " tuning runs (commits af70a75 and 6ae12cf); why was not written down. Those"
  " six chose the inner rate of 0.006. Its results have that rate and the"
  " warm-up of `allreduce_muon`, which was not tuned with an average. They are"
  " those of the ablation `ablate_average`, one core a run. Seed 0 was trained"
  " again for its curve, on two cores, where it ends at 1.2034 for 1.2044; the"
  " other two have none."
)
ON_MESSAGES = (
  "A message on the clock `1gbit` waits for a round trip, as gloo's do. That"
  " decided H, tau and the steps of these runs. With NCCL's rings AllReduce"
  " would take 88 ms a step instead of 139."
)
# Notes on this sweep.
NOTES = (
  ON_RULES,
  ON_NAMES,
  "Codecs take no time on the clocks, which favours methods that compress. On"
  " `1gbit` the latency (40 ms) matters more than the bytes of so small a"
  " model: this clock shows what overlap is worth, and `107b` what compression"
  " is worth.",
  ON_MESSAGES,
  ON_CURVES,
  ON_SEED_0,
  ON_AVERAGE,
  "DiLoCo's warm start was chosen after looking at runs of seed 0 as well.",
)


def every_method():
  """Returns the methods with H = 25, or with 500 as OpenDiLoCo's own."""
  given = {AVERAGE: {"given": GIVEN}}
  found = methods.every(25, 500, 300, CLOCKS)
  return [each | given.get(each["name"], {}) for each in found]


def get_config():
  """All methods on two replicas of `tiny`."""
  config = config_dict.ConfigDict()
  config.base = base = default.get_config()
  base.total_steps = 2000
  # The same numbers on every device: these are not left to it.
  base.model.compute_dtype = "float32"
  base.model.scan_unroll = 0
  base.mesh.stacked_by = "map"
  base.data.batch_size = 4
  base.inner.warmup_steps = 100
  base.evaluation.interval_steps = 100
  base.evaluation.num_sequences = 512
  base.checkpoint.interval_steps = 500
  base.checkpoint.keep = 1
  config.methods = every_method()
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
  config.equal_time = methods.contests(CLOCKS)
  config.claims = methods.claims(*CLOCKS)
  config.gaps = {"diloco": 0.012, "diloco_cold": 0.012}
  config.notes = NOTES
  config.lock()
  return config
