"""Names that a config chooses among, apart from the code that they choose.

A config has to be checked, and a command line answered, without the seconds
that it takes to load JAX.
"""

LAYOUTS = ("stacked", "mesh")  # Of replicas: on one device, or on one each.
SCHEDULES = ("constant", "cosine", "wsd")  # Of the inner learning rate.
REFERENCES = ("own", "mean")
RESIDUAL_DTYPES = ("float32", "bfloat16", "int8")
REMATS = ("none", "dots", "full")  # What a pipeline works out twice.
BOUNDARIES = ("none", "bfloat16", "int8")  # What travels between stages.
MEMORIES = ("device", "pinned_host")  # Where the outer state lies.

# Which of the options that configs have an optimizer takes, for the optimizers
# that are common enough to be checked before optax is loaded.
OPTIMIZER_OPTIONS = {
  "adam": ("b1", "b2", "nesterov"),
  "adamw": ("b1", "b2", "weight_decay", "nesterov"),
  "lion": ("b1", "b2", "weight_decay"),
  "muon": ("b1", "b2", "weight_decay", "nesterov"),
  "nadamw": ("b1", "b2", "weight_decay", "nesterov"),
  "rmsprop": ("momentum", "nesterov"),
  "sgd": ("momentum", "nesterov"),
}
