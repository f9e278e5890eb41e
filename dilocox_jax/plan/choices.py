"""Names that a config chooses among.

They stand apart from the code that they choose, so that a config can be checked
and a command line answered without the seconds that loading JAX takes.
"""

LAYOUTS = ("stacked", "mesh")  # Replicas share a device, or have their own.
COMPUTE_DTYPES = ("float32", "bfloat16")
SCHEDULES = ("constant", "cosine", "wsd")  # Inner learning rates.
WARM_STARTS = ("none", "data_parallel", "single")
REFERENCES = ("own", "mean")  # What a residual is measured against.
RESIDUAL_DTYPES = ("float32", "bfloat16", "int8")
REMATS = ("none", "dots", "full")  # What a backward computes again.
BOUNDARIES = ("none", "bfloat16", "int8")  # Activations sent between stages.
MEMORIES = ("device", "pinned_host")  # Where the outer state is kept.

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
