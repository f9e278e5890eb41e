"""What may travel between pipeline stages: fp32, bfloat16 or eight bits.

Each replica of the tiny model is cut into two stages. Activations that cross
the cut are rounded on the way forward, their gradients on the way back. This
config claims nothing: its figure shows what rounding costs. Cost: 3 runs for
every seed, each on four devices that the CPU emulates. Six runs, two at once,
took 4 min 28 s on two CPU cores (measured).

    python -m experiments.sweep \
        --config=experiments/configs/ablate_boundary.py \
        --workdir=runs/ablate_boundary --config.seeds='(0, 1, 2)'
"""

from ml_collections import config_dict

from dilocox_jax.plan.choices import BOUNDARIES
from experiments.configs import diloco


def get_config():
  """DiLoCo with replicas of two stages, and the ways to send less inside."""
  config = config_dict.ConfigDict()
  config.base = diloco.get_config()
  config.base.total_steps = 300
  config.base.evaluation.interval_steps = 0
  config.base.inner.accumulate_steps = 4
  config.base.mesh.layout = "mesh"
  config.base.mesh.num_stages = 2
  config.grid = config_dict.ConfigDict()
  config.grid.mesh = config_dict.ConfigDict({"boundary": BOUNDARIES})
  config.seeds = (0,)
  config.runs = []
  config.baseline = "boundary=none"
  config.lock()
  return config
