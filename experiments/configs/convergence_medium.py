"""Every method under one budget: ten million parameters.

The methods and the number of steps are those of `convergence_small`, with twice
as many tokens in a step. The model has eight layers of width 320. A step is
stated as 0.7 s: derived from its operations and from the rate at which two CPU
cores do those of the small model. This config claims nothing itself: its report
says which orderings hold. Cost: for every method 10 tuning runs and 3 results,
each about twenty times as long as there: days on two CPU cores, minutes a run
on a GPU (add --config.base.mesh.stacked_by=vmap there).

    python -m experiments.convergence \
        --config=experiments/configs/convergence_medium.py \
        --workdir=runs/convergence_medium --max_minutes=60
"""

from experiments.configs import convergence_small
from experiments.sweeps import method_list as methods


def get_config():
  """All methods on two replicas of a larger `tiny`."""
  config = convergence_small.get_config()
  # Without the settings that were found for the smaller model.
  config.methods = methods.every(25, 500, 300, convergence_small.CLOCKS)
  base = config.base
  base.model.num_layers = 8
  base.model.model_dim = 320
  base.model.num_heads = 5
  base.model.ff_dim = 856
  base.data.sequence_length = 256
  base.checkpoint.interval_steps = 100
  config.tuning.inner_learning_rates = (5e-4, 1e-3, 1.75e-3, 3e-3, 5e-3)
  config.clusters = [
    {"name": "1gbit", "cluster": "1gbit", "step_s": 0.7},
    convergence_small.CLOCK_107B,
  ]
  config.target_loss = 1.2
  config.notes = (
    convergence_small.ON_RULES,
    convergence_small.ON_NAMES,
    convergence_small.ON_CURVES,
  )
  return config
