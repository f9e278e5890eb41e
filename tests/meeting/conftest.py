"""A bucket of a server that was not written here, where it is installed."""

import pathlib
import subprocess

import obstore
import pytest
from obstore.store import HTTPStore

from experiments.runtime.distributed_flags import free_port

MOTO = pathlib.Path(__file__).parents[2] / "build/moto/bin/moto_server"


@pytest.fixture(scope="session", name="bucket")
def bucket_fixture():
  """Options of a store of S3, whose server `make check` installs."""
  if not MOTO.exists():
    pytest.skip("run `make build/moto/.installed`")
  endpoint = f"http://127.0.0.1:{(port := free_port())}"
  plain = HTTPStore(endpoint, client_options={"allow_http": True})
  command = [MOTO, f"--port={port}"]
  with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
    obstore.put(plain, "bucket", b"")  # As soon as it listens.
    keys = dict.fromkeys(["access_key_id", "secret_access_key"], "any")
    yield keys | {"endpoint": endpoint, "region": "us-east-1"}
    server.kill()
