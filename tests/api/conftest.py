"""Runs of these tests draw no pictures: tests/report sees those.

A module of another folder that imports the fixture draws none either.
"""

import pytest

from dilocox_jax import report


@pytest.fixture(autouse=True, scope="module")
def no_pictures():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(report, "write_report", lambda workdir: workdir)
    yield
