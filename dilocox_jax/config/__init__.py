"""The description of one run: sections of checked, frozen fields."""

from dilocox_jax.config.run import FREE_ON_RESUME as FREE_ON_RESUME
from dilocox_jax.config.run import RunConfig as RunConfig
from dilocox_jax.config.run import from_mapping as from_mapping
