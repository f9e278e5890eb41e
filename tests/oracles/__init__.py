"""What the numpy reference is tried on: problems, config sections, a decoder.

The methods themselves are in `dilocox_jax.reference`.
"""
