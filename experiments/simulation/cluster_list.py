"""Prints the clusters that have a name."""

import shutil
import textwrap

from dilocox_jax.simulate.cluster_file import cluster_presets

_NAME_WIDTH = 22


def print_clusters() -> None:
  """Prints name and description of each cluster, as wide as the terminal."""
  width = shutil.get_terminal_size().columns
  for name, preset in cluster_presets().items():
    indent = " " * (_NAME_WIDTH + 1)
    text = f"{name:{_NAME_WIDTH}} {preset['description']}"
    print(textwrap.fill(text, width, subsequent_indent=indent))
