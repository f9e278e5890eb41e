"""Makes every test run under JAX's strictest settings.

The settings must stand before any test module touches a device, hence here
and at import.
"""

import gc
import importlib.metadata
import os
import pathlib
import platform
import re

# What a scheduler, a container, a proxy, a terminal, Git or a user's profile
# may have set. It would change what programs do and print.
_FOREIGN = re.compile(
  r"(SLURM|OMPI|PMIX?|JAX_COORDINATOR|JAX_LOCAL|MEGASCALE|KUBERNETES|AWS|GIT)_"
  r"|.*_proxy$|(COLUMNS|LINES|TERM|(NO|FORCE)_COLOR|DILOCOX_JAX_COMMAND)$",
  re.IGNORECASE,
)
for _name in filter(_FOREIGN.match, list(os.environ)):
  del os.environ[_name]

# Read by matplotlib, by JAX and by every process that a test starts.
os.environ["MPLBACKEND"] = "Agg"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight devices share a few cores: one may be late without being lost. Programs
# here are small and many, so that compiling them quickly saves half of the
# time; `make check` compiles them as users do.
_PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=300"
_QUICK = (
  "--xla_backend_optimization_level=0",
  "--xla_llvm_disable_expensive_passes=true",
  # The older code generator, which JAX 0.10 still has, takes half the time. It
  # fuses a * b + c into one rounding in some programs and not in others, which
  # would change bits between them. Instructions without such a product do not.
  *(
    ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_max_isa=AVX")
    if importlib.metadata.version("jaxlib") < "0.11"
    and platform.machine() == "x86_64"
    else ()
  ),
)
_COMPILES_FULLY = os.environ.get("DILOCOX_JAX_COMPILE") == "full"
os.environ.setdefault(
  "XLA_FLAGS", " ".join((_PATIENT, *(() if _COMPILES_FULLY else _QUICK)))
)
_ROOT = pathlib.Path(__file__).resolve().parents[1]
os.environ.setdefault("DILOCOX_JAX_CACHE", str(_ROOT / ".cache" / "jax"))
# Every program is kept, the smallest too: another module or process needs it.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# Tracing makes objects by the million, and hardly any in cycles: to look for
# these seldom takes a tenth less time.
gc.set_threshold(50_000)

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from tests.rounded_products import round_products  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update(
  "jax_compilation_cache_dir", os.environ["DILOCOX_JAX_CACHE"] or None
)

# "tf32" or "bf16": see tests/contracts/test_lint.py.
if _PRODUCTS := os.environ.get("DILOCOX_JAX_PRODUCTS"):
  round_products(_PRODUCTS)

# The same examples every time, at any speed; the other profile goes looking:
# pytest --hypothesis-profile=search
hypothesis.settings.register_profile(
  "steady", derandomize=True, deadline=None, database=None, max_examples=50
)
hypothesis.settings.register_profile(
  "search", deadline=None, database=None, max_examples=1000
)
hypothesis.settings.load_profile("steady")


@pytest.fixture
def x64():
  """Enables float64 for one test; oracles agree to 1e-12 only there."""
  with jax.enable_x64(True):
    yield


@pytest.fixture(autouse=True, scope="module")
def _programs_are_let_go():
  """Frees a module's compiled programs when it is done.

  Every program maps memory of its own, and the system grants a process some
  65,000 maps; a thousand tests in one process come near, and XLA then aborts.
  """
  yield
  jax.clear_caches()
