"""Colour and marker of every method, the same in every picture.

The first seven colours are those of Okabe and Ito, which people with impaired
colour vision can tell apart; markers tell the rest.
"""

import re
from collections.abc import Sequence

from dilocox_jax.report import style

Look = dict[str, str]
# By the name of the method without anything but letters; a longer name of a
# setting that begins with one of these has its look.
_METHODS = {
  "allreduce": ("black", "."),
  "overlaploco": (style.COLOURS[0], "o"),
  "dilocox": (style.COLOURS[1], "s"),
  "muloco": (style.COLOURS[2], "D"),
  "diloco": (style.COLOURS[3], "^"),
  "opendiloco": (style.COLOURS[4], "v"),
  "streaming": (style.COLOURS[5], "P"),
  "cocktail": ("#8C564B", "X"),
  "sparseloco": ("#8A8A00", "*"),
  "eager": ("#6A3D9A", "<"),
  "delayed": ("#B2182B", ">"),
  "ours": ("#B2182B", ">"),
}
# Settings of one method in one picture.
_LINES = ("-", "--", ":", "-.")


def method_look(name: str) -> tuple[str, str] | None:
  """Returns colour and marker of a method, or None if it is not known.

  Args:
    name: Name of a method or of a setting, e.g. "dilocox_reset_1gbit".
  """
  plain = re.sub(r"[^a-z]", "", name.lower())
  known = [key for key in _METHODS if plain.startswith(key)]
  return _METHODS[max(known, key=len)] if known else None


def looks(names: Sequence[str]) -> dict[str, Look]:
  """Returns colour, marker and line of each curve, by its name.

  Curves of one method differ in their lines. What is no method gets the colours
  in order.

  Args:
    names: Names of the curves, in order.
  """
  found: dict[str, Look] = {}
  seen: dict[str, int] = {}
  unknown = [name for name in names if method_look(name) is None]
  for name in names:
    look = method_look(name)
    if look is None:
      place = unknown.index(name) % len(style.COLOURS)
      look = style.COLOURS[place], style.MARKERS[place]
    turn = seen[look[0]] = seen.get(look[0], -1) + 1
    line = _LINES[turn % len(_LINES)]
    found[name] = {"color": look[0], "marker": look[1], "linestyle": line}
  return found
