"""Runs of these tests draw no pictures: tests/report sees those."""

import pytest

from dilocox_jax import report


@pytest.fixture(autouse=True, scope="module")
def _no_pictures():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(report, "write_report", lambda workdir: workdir)
    yield
