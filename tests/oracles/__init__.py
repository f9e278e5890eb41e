"""What the fast code is compared with, and problems to try both on.

The methods themselves are in `dilocox_jax.reference`. Here are codecs, slices
of leaves, replicas that are away or slow, the papers' settings (`published`),
a bound on convergence, and a decoder, all in numpy.
"""
