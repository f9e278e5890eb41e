"""The config of a run: frozen dataclasses that check their fields."""

from dilocox_jax.config.run import RunConfig as RunConfig
from dilocox_jax.config.run import free_on_resume as free_on_resume
from dilocox_jax.config.run import from_mapping as from_mapping
from dilocox_jax.config.run import may_differ as may_differ
