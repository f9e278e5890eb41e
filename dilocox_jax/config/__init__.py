"""The config of one run: sections of frozen fields that were checked."""

from dilocox_jax.config.run import FREE_ON_RESUME as FREE_ON_RESUME
from dilocox_jax.config.run import RunConfig as RunConfig
from dilocox_jax.config.run import from_mapping as from_mapping
