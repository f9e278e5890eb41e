"""Reads the outer parameters of a run's checkpoint leaf by leaf.

An export needs only one leaf at a time. The whole checkpoint may need much more
memory than the model, because it also holds the parameters and the optimizer
states of all replicas.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from dilocox_jax.outer.average import tree_to_keep
from dilocox_jax.outer.fragment_view import FragmentView
from dilocox_jax.rounds.data_parallel import SharedState
from dilocox_jax.rounds.states import mean_of
from dilocox_jax.training.build import Programs
from dilocox_jax.training.checkpoint import SavedArray
from dilocox_jax.training.states import TrainingState
from dilocox_jax.trees import LazyArray, leaves_by_path, nested


@dataclasses.dataclass(frozen=True)
class SavedLeaf(LazyArray):
  """A parameter of a model whose values are still in the files of a checkpoint.

  Attributes:
    path: Path of the parameter, e.g. "head/kernel".
    shape: Shape of the parameter.
    dtype: Type of the parameter, as numpy names it.
    view: Joins the fragments (parts of the parameters) to whole leaves.
    parts: For every fragment, its part of the parameter; None if the fragment
      has no part of it. If there is one fragment, it has the whole parameter.
    is_shared: Whether all replicas share their outer parameters. If not, the
      parts begin with an axis of the replicas, and the parameter is the mean
      over this axis.
  """

  path: str
  shape: tuple[int, ...]
  dtype: Any
  view: FragmentView
  parts: Sequence[SavedArray | None]
  is_shared: bool

  def part(self, index: tuple[slice, ...]) -> np.ndarray:
    """Reads the whole parameter, and returns a slice of it.

    Raises:
      RefusedError: If the checkpoint does not have the parameter.
    """
    leaves = [self._read(part) for part in self.parts]
    if len(leaves) == 1:
      return np.asarray(leaves[0])[index]
    like = nested({self.path: np.zeros(self.shape, np.float32)})
    trees = [nested({self.path: leaf}) for leaf in leaves]
    merged = self.view.merge(like, trees)
    return np.asarray(leaves_by_path(merged)[self.path])[index]

  def _read(self, part: SavedArray | None) -> Any:
    """Reads a part of the parameter; returns `optax.MaskedNode` for None."""
    if part is None:
      return optax.MaskedNode()
    values = part.read()
    if self.is_shared:
      return values
    return mean_of(values)


def saved_leaves(programs: Programs, state: TrainingState) -> dict[str, Any]:
  """Returns the outer parameters of a checkpoint without reading them.

  Args:
    programs: Programs of a run that trained a model of this package.
    state: State of the checkpoint, with a `SavedArray` in place of each array.

  Returns:
    A nested dict with a `SavedLeaf` for each outer parameter, or for its
    average if the run keeps one.
  """
  view = programs.rounds.view
  if isinstance(state, SharedState):
    trees = [tree_to_keep(state.optimizer, state.params)]
    is_shared = True
  else:
    trees = [
      tree_to_keep(fragment.optimizer, fragment.params)
      for fragment in state.fragments
    ]
    is_shared = programs.rounds.outer.is_shared
  parts_by_fragment = [leaves_by_path(tree) for tree in trees]
  shapes = jax.eval_shape(programs.model.init, jax.random.key(0))
  leaves = {}
  for path, leaf in leaves_by_path(shapes).items():
    leaves[path] = SavedLeaf(
      path=path,
      shape=leaf.shape,
      dtype=leaf.dtype,
      view=view,
      parts=[parts.get(path) for parts in parts_by_fragment],
      is_shared=is_shared,
    )
  return nested(leaves)
