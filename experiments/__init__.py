"""Programs that use `dilocox_jax`; each explains itself with --help.

`python -m experiments` lists the programs.
"""

import importlib.util
import sys

# Packages that the programs import at once, and a plain installation of
# `dilocox_jax` may lack.
_PACKAGES = (
  "absl",
  "flax",
  "grain",
  "matplotlib",
  "ml_collections",
  "obstore",
  "orbax",
  "pandas",
  "rich",
)


def _check_packages() -> None:
  """Raises ImportError if a package of the programs is missing.

  A program that was started with `python -m` instead exits with code 2.
  """
  missing = [
    name for name in _PACKAGES if importlib.util.find_spec(name) is None
  ]
  if not missing:
    return
  message = (
    f"the programs in experiments need {', '.join(missing)}: "
    "pip install -e '.[experiments]', or make install"
  )
  # Python sets this first argument while it looks for the module of `-m`.
  if sys.argv[:1] == ["-m"]:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
  raise ImportError(message)


# Every program passes here before its own imports could fail.
_check_packages()
