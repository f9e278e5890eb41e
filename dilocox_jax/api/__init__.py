"""The library as users import it; `dilocox_jax` has lazy names for it."""
