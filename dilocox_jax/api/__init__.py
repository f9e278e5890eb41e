"""Functions that a user calls: `train`, `load`, `make_rounds` and others.

`dilocox_jax/__init__.py` lists all public names, with the modules that define
them.
"""
