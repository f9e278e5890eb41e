import subprocess
import sys

from dilocox_jax.meeting.secret import read_secret


def make(file):
  command = [sys.executable, "-m", "experiments.make_secret", f"--file={file}"]
  return subprocess.run(command, capture_output=True, text=True)


def test_a_secret_is_made_once_and_can_be_read(tmp_path):
  file = tmp_path / "new" / "run.secret"
  assert make(file).returncode == 0
  secret = read_secret(file)
  again = make(file)
  assert again.returncode == 2
  assert again.stderr.count("\n") == 1 and "exists" in again.stderr
  assert read_secret(file) == secret
