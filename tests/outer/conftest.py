import jax
import pytest


@pytest.fixture
def quick_compiles():
  """Halves the compilation of a transformer's round; it then runs slower."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)
