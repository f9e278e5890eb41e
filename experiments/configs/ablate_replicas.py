"""`overlap_loco` on two, four and eight replicas with one global batch.

Eight sequences a step are divided between the replicas, so the steps and the
tokens are those of the small sweep, and its AllReduce is what to compare with.
The rest is as in `ablate_average`. This config claims nothing: docs/log.md says
what was found. Cost: four to ten minutes a run on a core.

    python -m experiments.ablate \
        --config=experiments/configs/ablate_replicas.py \
        --workdir=runs/ablate_replicas --processes=2
"""

from experiments.configs import ablate_average

SEQUENCES = 8  # Of a step, on all replicas together.


def get_config():
  """Returns all numbers of replicas on three seeds."""
  config = ablate_average.get_config()
  with config.unlocked():
    config.runs = [
      {
        "name": f"{count} replicas",
        **ablate_average.OURS,
        "mesh.num_replicas": count,
        "data.batch_size": SEQUENCES // count,
      }
      for count in (2, 4, 8)
    ]
  return config
