"""Sizes and memory of a model that no machine here could hold."""

import re
import subprocess
import sys

from dilocox_jax.plan.model.presets import MODEL_PRESETS
from dilocox_jax.plan.model.shapes import flops_per_token, parameter_count


def show(*flags):
  done = subprocess.run(
    [sys.executable, "-m", "experiments.show_model", *flags],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def kept(text):
  rows = re.findall(r"^ (\S+) +([\d.]+) (\w+) $", text, re.MULTILINE)
  return {name: (float(number), unit) for name, number, unit in rows}


def test_a_model_of_the_papers_is_counted_and_spread_over_a_mesh():
  text = show(
    "--config=experiments/configs/papers.py:dilocox_107b",
    "--config.exchange.error_feedback=False",
  )
  shape = MODEL_PRESETS["qwen_107b"]
  assert f"{parameter_count(shape):,}" in text
  assert f"{flops_per_token(shape, 2048):.4g} FLOPs a token" in text
  sizes = kept(text)
  # 16 devices hold a replica of 4 bytes a parameter.
  expected = 4 * parameter_count(shape) / 16 / 1e9
  number, unit = sizes["replica/params"]
  assert unit == "GB" and abs(number / expected - 1) < 0.02
  assert sizes["replica/optimizer"][0] > 1.9 * number
  assert sizes["fragments/params"] == sizes["replica/params"]


def test_stacked_replicas_are_all_on_one_device():
  text = show("--config.model.preset=nano", "--config.mesh.num_replicas=3")
  total = 3 * 4 * parameter_count(MODEL_PRESETS["nano"])
  number, unit = kept(text)["replica/params"]
  assert unit == "kB" and abs(1e3 * number / total - 1) < 0.01
