"""A bucket of a server that was not written here, and a folder of a victim."""

import pathlib
import subprocess
import time

import obstore
import pytest
from obstore.exceptions import BaseError
from obstore.store import HTTPStore

from experiments.runtime.placement import free_port
from tests import runs

MOTO = pathlib.Path(__file__).parents[2] / "build/moto/bin/moto_server"
STARTS_WITHIN_S = 120.0  # Also where the machine has other work.


@pytest.fixture(scope="session", name="bucket")
def bucket_fixture():
  """Options of a store of S3, whose server `make check` installs."""
  if not MOTO.exists():
    pytest.skip("run `make build/moto/.installed`")
  endpoint = f"http://127.0.0.1:{(port := free_port())}"
  command = [MOTO, f"--port={port}"]
  with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
    try:
      _make_bucket(endpoint)
      keys = dict.fromkeys(["access_key_id", "secret_access_key"], "any")
      yield keys | {"endpoint": endpoint, "region": "us-east-1"}
    finally:
      server.kill()


def _make_bucket(endpoint):
  """Makes the bucket as soon as the server listens."""
  plain = HTTPStore(endpoint, client_options={"allow_http": True})
  end = time.monotonic() + STARTS_WITHIN_S
  while True:
    try:
      obstore.put(plain, "bucket", b"")
      return
    except BaseError:
      if time.monotonic() > end:
        raise
      time.sleep(0.2)


@pytest.fixture(name="victim")
def victim_fixture(tmp_path):
  """A folder of somebody else, with names that a run gives; it has to stay."""
  victim = tmp_path / "victim"
  for path in ("thesis.tex", "index", "arrays", "claim", "oslo", "0/oslo"):
    for folder in (victim, victim / "0000000001"):
      (folder / path).parent.mkdir(parents=True, exist_ok=True)
      (folder / path).write_text("precious")
  before = runs.files(victim)
  yield victim
  assert runs.files(victim) == before
