"""Names that a config chooses among, apart from the code that they choose.

A config has to be checked, and a command line answered, without the seconds
that it takes to load JAX.
"""

LAYOUTS = ("stacked", "mesh")  # Of replicas: on one device, or on one each.
SCHEDULES = ("constant", "cosine", "wsd")  # Of the inner learning rate.
REFERENCES = ("own", "mean")
RESIDUAL_DTYPES = ("float32", "bfloat16", "int8")
