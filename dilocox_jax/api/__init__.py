"""The functions and classes that a user imports from `dilocox_jax`.

`dilocox_jax` imports each of them when it is first used.
"""
