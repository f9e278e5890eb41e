"""Step times from operations, with and without a pipeline."""

import dataclasses

import numpy as np
import pytest

from dilocox_jax.plan.pipeline.timeline import Pipeline
from dilocox_jax.simulate.compute import stated_seconds, step_seconds
from tests.simulate import small


def devices(count, **changes):
  one = small.cluster(2)
  sites = tuple(
    dataclasses.replace(site, num_devices=count, **changes)
    for site in one.sites
  )
  return dataclasses.replace(one, sites=sites)


def test_a_step_is_its_operations_over_what_the_devices_achieve():
  one = devices(4, peak_flops=1e12, achieved_fraction=0.5)
  seconds, bubble_fraction = step_seconds(one, 8e12)
  np.testing.assert_allclose(seconds, [4.0, 4.0])
  assert bubble_fraction == 0


def test_a_slow_site_takes_longer():
  one = devices(4, peak_flops=1e12, achieved_fraction=0.5)
  slow = dataclasses.replace(one.sites[1], speed=0.25)
  uneven = dataclasses.replace(one, sites=(one.sites[0], slow))
  np.testing.assert_allclose(step_seconds(uneven, 8e12)[0], [4.0, 16.0])


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_pipeline_adds_the_bubble_of_the_literature(name):
  one = devices(4, peak_flops=1e12, achieved_fraction=0.5)
  seconds, bubble_fraction = step_seconds(one, 8e12, Pipeline(name, 4, 8))
  # (p - 1) / m of the ideal step is added.
  np.testing.assert_allclose(seconds, 4.0 * (1 + 3 / 8))
  assert bubble_fraction == pytest.approx(3 / (8 + 3))


def test_activations_on_the_way_lengthen_a_step():
  one = devices(4, intra_bps=8e9)
  pipeline = Pipeline("1f1b", 4, 8)
  near, _ = step_seconds(one, 8e12, pipeline)
  far, _ = step_seconds(one, 8e12, pipeline, hop_bytes=1e9)
  assert np.all(far >= near + 6 * 1.0)  # There and back over three hops.


def test_more_stages_than_devices_are_refused():
  with pytest.raises(ValueError, match="num_stages=5 must be at most the 4"):
    step_seconds(devices(4), 8e12, Pipeline("1f1b", 5, 8))


def test_a_stated_step_takes_as_long_as_the_speed_of_its_site_says():
  one = devices(4)
  slow = dataclasses.replace(one.sites[1], speed=0.25)
  uneven = dataclasses.replace(one, sites=(one.sites[0], slow))
  np.testing.assert_allclose(stated_seconds(uneven, 2.0), [2.0, 8.0])
