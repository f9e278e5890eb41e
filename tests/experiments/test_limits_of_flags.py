"""Limits of flags, and settings that are what their names say."""

import re

import pytest

from dilocox_jax.codecs.named import link_names
from experiments.configs import compression
from experiments.sweeps import runs
from tests.experiments.programs import run

# The names of codecs in names of runs.
CODECS = {"top": "top_k", "mask": "random_mask", "rank": "low_rank"}


@pytest.mark.parametrize(
  "flag",
  [
    "--temperature=-0.5",
    "--top_p=0",
    "--top_p=1.5",
    "--num_tokens=0",
    "--num_tokens=9999999999999999999",
    "--seed=4294967296",
  ],
)
def test_a_sample_has_limits(tmp_path, flag):
  done = run("sample", f"--run={tmp_path}", flag)
  name = flag.removeprefix("--").partition("=")[0]
  assert done.returncode == 2 and name in done.one_line


def test_runs_of_a_sweep_of_codecs_are_what_their_names_say():
  found = runs.runs_of(compression.get_config().to_dict())
  assert len(found) == 20
  for each in found:
    codec = each.config.exchange.codec
    feedback = re.search(r"ef(?: ([\d.]+))?$", each.name)
    expected = float(feedback[1] or 1.0) if feedback else 0.0
    assert each.config.exchange.feedback == expected
    for word, number in re.findall(
      r"(rank|int|top|mask) ?([\d./]+)", each.name
    ):
      top, _, bottom = number.partition("/")
      value = float(top) / float(bottom or 1)
      assert CODECS.get(word, word) in link_names(codec)
      assert f"={value:g}" in codec or f"={value}" in codec
