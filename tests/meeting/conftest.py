"""A bucket of a server that was not written here, where it is installed."""

import pathlib
import subprocess
import time
import urllib.request

import pytest

from experiments.runtime.distributed_flags import free_port

MOTO = pathlib.Path(__file__).parents[2] / "build/moto/bin/moto_server"


@pytest.fixture(scope="session", name="bucket")
def bucket_fixture():
  """Options of a store of S3, whose server `make check` installs."""
  if not MOTO.exists():
    pytest.skip("run `make build/moto/.installed`")
  endpoint = f"http://127.0.0.1:{(port := free_port())}"
  made = urllib.request.Request(f"{endpoint}/bucket", method="PUT")
  command = [MOTO, f"--port={port}"]
  with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
    while server.poll() is None:
      try:
        urllib.request.urlopen(made).close()
        break
      except OSError:  # It does not listen yet.
        time.sleep(0.1)
    keys = dict.fromkeys(["access_key_id", "secret_access_key"], "any")
    yield keys | {"endpoint": endpoint, "region": "us-east-1"}
    server.kill()
