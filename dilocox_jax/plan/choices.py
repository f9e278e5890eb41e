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
