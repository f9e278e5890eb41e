"""Functions that a user calls, and what they need.

The functions are `train`, `load`, `estimate`, `make_rounds`, `compare_methods`
and others. `dilocox_jax/__init__.py` lists all public names and the module that
defines each of them.
"""
