"""What the plan says is on the wire is what the compiler for TPUs sends.

The CPU's program is read in `test_bytes`. The compiler for TPUs chooses other
operations: it turns a gathering over slices into a sum, for example, so that
codes would be sent twice.
"""

import jax
import pytest

from dilocox_jax.aggregators.collectives import collectives
from dilocox_jax.aggregators.feedback import exchange
from dilocox_jax.codecs.low_rank import LowRank
from dilocox_jax.codecs.quantize import E3M0, Float, Int
from dilocox_jax.codecs.sparse import RandomMask, TopK
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.plan.model.division import Division
from experiments.compilation import hlo
from experiments.compilation.topology import (
  is_compiler_installed,
  topology_devices,
)
from experiments.compilation.transfers import sent_bytes
from tests.contracts.test_bytes import params_like

DIVISION = Division(2, 2)
# Large enough for the tiles of 1024 values that a chip sends.
SHAPES = {
  "embed/embedding": (512, 256),
  "blocks/up/kernel": (4, 256, 512),
  "blocks/up/bias": (4, 512),
}


def both(tree):
  """Shapes of two replicas' leaves, [2, ...]."""
  return jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), tree
  )


@pytest.mark.slow
@pytest.mark.skipif(
  not is_compiler_installed(), reason="make compile-report installs libtpu"
)
@pytest.mark.parametrize(
  "codec",
  [
    Float(),
    Int(4),
    E3M0(),
    LowRank(32, then=Int(4)),
    RandomMask(0.5, then=TopK(0.25, 4096, "bitmap", Int(4))),
  ],
  ids=repr,
)
def test_an_exchange_between_slices_sends_the_bytes_of_the_plan(codec):
  devices = tuple(topology_devices("v5e:2x2", 2))
  replicas = Replicas(2, "mesh", DIVISION, devices)
  aggregator = exchange(codec, feedback=1.0)
  params = params_like(SHAPES)
  axes = aggregator.axes

  def one(values, state):
    mean, state = aggregator.update(values, state)
    return replicas.divided(mean), replicas.divided(state)

  program = jax.jit(replicas.map(one, (0, axes), (None, axes)))
  values = replicas.abstract(both(params), 0)
  state = jax.eval_shape(aggregator.init, params)
  state = state._replace(residual=both(state.residual))
  lowered = program.lower(values, replicas.abstract(state, axes))
  module = hlo.parse(lowered.compile().as_text() or "")
  sent = DIVISION.num_devices * sent_bytes(module)
  print(f"{codec}: {sent:.0f} bytes")
  planned = sum(each.sent_bytes(2) for each in collectives(codec, SHAPES, 2))
  assert 1 <= sent / planned < 1.05
