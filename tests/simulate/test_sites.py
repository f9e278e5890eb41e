import dataclasses

import pytest

from dilocox_jax.simulate.quantities import SHARE, TIME
from dilocox_jax.simulate.sites import (
  FileKey,
  Jitter,
  Link,
  Pair,
  Site,
  SiteOutage,
  file_keys,
)

LINK = Link(1e9, 1e9)


@pytest.mark.parametrize(
  "build, message",
  [
    (lambda: Link(-1e9, 1e9), "up_bps=-1 Gbit/s must be more than 0 bit/s"),
    (lambda: Link(1e9, 0.0), "down_bps=0 bit/s must be more than 0 bit/s"),
    (
      lambda: Link(1e9, 1e9, rtt_s=-1.0),
      "rtt_s=-1 s must be at least 0 s and finite",
    ),
    (
      lambda: Link(1e9, 1e9, loss=1.0),
      "loss=100 % must be at least 0 % and less than 100 %",
    ),
    (lambda: Link(1e9, 1e9, streams=0), "streams=0 must be at least 1"),
    (
      lambda: Link(1e9, 1e9, window_bytes=0.0),
      "window_bytes=0 B must be more than 0 B",
    ),
    (
      lambda: Link(1e9, 1e9, efficiency=1.5),
      "efficiency=150 % must be more than 0 % and at most 100 %",
    ),
    (
      lambda: Site("a/b", LINK),
      "name='a/b' must be made of letters, digits, spaces and _.+-",
    ),
    (
      lambda: Site("a", LINK, num_devices=0),
      "num_devices=0 must be at least 1",
    ),
    (
      lambda: Site("a", LINK, peak_flops=-1e12),
      "peak_flops=-1 TFLOP/s must be more than 0 FLOP/s",
    ),
    (
      lambda: Site("a", LINK, achieved_fraction=2.0),
      "achieved_fraction=200 % must be more than 0 % and at most 100 %",
    ),
    (
      lambda: Site("a", LINK, speed=0.0),
      "speed=0 must be more than 0 and finite",
    ),
    (lambda: Site("a", LINK, num_stages=0), "num_stages=0 must be at least 1"),
    (
      lambda: Site("a", LINK, intra_bps=0.0),
      "intra_bps=0 bit/s must be more than 0 bit/s",
    ),
    (
      lambda: Site("a", LINK, intra_rtt_s=-1e-3),
      "intra_rtt_s=-1 ms must be at least 0 s and finite",
    ),
    (
      lambda: Pair(("a", "a"), 1e9, 0.0),
      "sites=('a', 'a') must be two different sites",
    ),
    (
      lambda: Pair(("a", "b"), 0.0, 0.0),
      "bps=0 bit/s must be more than 0 bit/s",
    ),
    (
      lambda: Pair(("a", "b"), 1e9, -1.0),
      "rtt_s=-1 s must be at least 0 s and finite",
    ),
    (
      lambda: Jitter(step_sigma=-0.1),
      "step_sigma=-10 % must be at least 0 % and finite",
    ),
    (
      lambda: Jitter(transfer_sigma=-0.1),
      "transfer_sigma=-10 % must be at least 0 % and finite",
    ),
    (lambda: Jitter(seed=-1), "seed=-1 must be at least 0"),
    (
      lambda: SiteOutage("a", -1.0, 2.0),
      "start_s=-1 s must be at least 0 s and finite",
    ),
    (
      lambda: SiteOutage("a", 10.0, 10.0),
      "stop_s=10 s must be more than 10 s",
    ),
  ],
)
def test_a_value_out_of_range_is_named_and_told_its_range(build, message):
  with pytest.raises(ValueError) as error:
    build()
  assert str(error.value) == message


@pytest.mark.parametrize("section", [Link, Site, Pair, Jitter, SiteOutage])
def test_every_attribute_has_a_key_of_its_own_in_a_file(section):
  keys = file_keys(section)
  fields = {field.name for field in dataclasses.fields(section)}
  assert set(keys) == fields - {"link"}
  assert len({key.name for key in keys.values()}) == len(keys)


def test_a_site_and_its_link_share_no_key():
  names = [key.name for cls in (Site, Link) for key in file_keys(cls).values()]
  assert len(set(names)) == len(names)


def test_an_end_belongs_to_a_range_only_if_its_bracket_says_so():
  half_open = FileKey("loss", SHARE, 0, 1, "[)")
  half_open.check("loss", 0.0)
  with pytest.raises(ValueError) as error:
    half_open.check("loss", 1.0)
  assert str(error.value) == (
    "loss=100 % must be at least 0 % and less than 100 %"
  )
  other_half = FileKey("efficiency", SHARE, 0, 1, "(]")
  other_half.check("efficiency", 1.0)
  with pytest.raises(
    ValueError, match="=0 % must be more than 0 % and at most"
  ):
    other_half.check("efficiency", 0.0)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_number_out_of_range_is_shown_with_its_unit(value):
  with pytest.raises(
    ValueError, match="rtt_s=.* s must be at least 0 s and fi"
  ):
    FileKey("rtt", TIME, 0, ends="[)").check("rtt_s", value)
