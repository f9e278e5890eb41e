"""CocktailSGD as its authors' code has it: progress is sent, not gradients.

Source: Wang et al., 2023, ICML, and the code published with it (read). In every
step each replica takes an AdamW step by itself. Its difference from the common
parameters goes through mask, top-k and 4 bits and is applied a step later. What
was not sent stays in its parameters. Claim: none of its own. Differs: top-k by
blocks; messages are gathered, where in that code the owner of a slice
compresses the mean again. Cost: three minutes on two CPU cores.

    python -m experiments.train \
        --config=experiments/configs/cocktail_params.py \
        --workdir=runs/cocktail_params
"""

from dilocox_jax.config.recipes import RECIPES
from experiments.configs import default


def get_config():
  """Returns CocktailSGD's codec in rounds of one step that arrive one late."""
  config = default.get_config()
  config.update_from_flattened_dict(RECIPES["cocktail_sgd"])
  config.sync.method = "delayed"
  config.sync.sync_interval = 1
  config.sync.overlap_steps = 1
  config.sync.rule = "continue"
  config.outer.learning_rate = 1.0
  config.outer.momentum = 0.0
  config.exchange.feedback = 0.0
  config.exchange.keep_unsent = True
  return config
