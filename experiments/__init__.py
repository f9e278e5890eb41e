"""Thin binaries over `dilocox_jax`; each explains itself with --help."""
