"""The methods of `convergence_small` that were trained with AdamW, with Muon.

Muon is an inner optimizer and no exchange of its own, so a fair comparison
gives it to every method. Here eleven have Muon: AllReduce (with an average and
without), MuLoCo and `overlap_loco` with the runs that they have there, and
seven that lack it there. Model, text, clocks, seeds and rounds are the same, so
the losses of the two sweeps compare. A method was tuned with seven runs, for 11
there (docs/results/convergence_muon_others.csv).

    python -m experiments.sweep --workdir=runs/convergence_muon \
        --config=experiments/configs/convergence_muon.py --processes=2
"""

from experiments.configs import convergence_small as small


def get_config():
  """Eleven methods on two replicas of `tiny`, all with Muon."""
  config = small.get_config()
  config.rows = "docs/results/convergence_muon.csv"
  config.baseline = "allreduce_muon"
  config.baselines = {"overlap_loco": "allreduce_muon_average"}
  config.notes = (
    *(small.ON_READINGS, small.ON_NAMES, small.ON_MESSAGES, small.ON_CURVES),
    *(small.ON_SEED_0, small.ON_AVERAGE, small.ON_JUDGE),
  )
  return config
