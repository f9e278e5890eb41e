import asyncio
import gc

import pytest

from dilocox_jax.training import save_errors


@pytest.mark.parametrize(
  ("error", "expected"),
  [
    (OSError(28, "No space left on device"), True),
    (ValueError("cannot write [os_error_code='28']"), True),
    (ValueError("a bug"), False),
  ],
)
def test_errors_of_the_disk_are_known_through_others(error, expected):
  outer = RuntimeError("a thread failed")
  outer.__cause__ = error
  assert save_errors.is_of_disk(outer) == expected


@pytest.mark.parametrize("file", ["orbax/path.py", "other/path.py"])
def test_errors_that_nobody_awaits_show_unless_they_are_orbaxs(caplog, file):
  code = "async def fail():\n  raise OSError('No space left on device')"
  names = {}
  exec(compile(code, file, "exec"), names)  # noqa: S102

  async def forget():
    await asyncio.wait([asyncio.ensure_future(names["fail"]())])

  save_errors.hide_tracebacks()
  asyncio.run(forget())
  gc.collect()
  assert bool(caplog.records) == (file == "other/path.py")
