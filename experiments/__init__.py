"""Programs that use `dilocox_jax`; each explains itself with --help."""
