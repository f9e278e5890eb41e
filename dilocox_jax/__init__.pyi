"""Public names of `dilocox_jax`, for editors and type checkers.

`make stubs` writes this file, and a test compares it with the code.
"""

from collections.abc import Callable

from optax import GradientTransformation, GradientTransformationExtraArgs

from dilocox_jax.aggregator import Aggregator as Aggregator
from dilocox_jax.aggregator import Averaged as Averaged
from dilocox_jax.aggregators.collective import Collective as Collective
from dilocox_jax.aggregators.collective import Sender as Sender
from dilocox_jax.aggregators.collective import (
  register_collective as register_collective,
)
from dilocox_jax.aggregators.exchange import exchange as exchange
from dilocox_jax.aggregators.norm_filter import norm_filter as norm_filter
from dilocox_jax.aggregators.sizes import encoded_bytes as encoded_bytes
from dilocox_jax.api.growing_plans import growing_plans as growing_plans
from dilocox_jax.api.method_plans import compare_methods as compare_methods
from dilocox_jax.api.rounds import make_rounds as make_rounds
from dilocox_jax.api.runs import estimate as estimate
from dilocox_jax.api.runs import load as load
from dilocox_jax.api.runs import train as train
from dilocox_jax.api.step_methods import step_transform as step_transform
from dilocox_jax.checks import limited as limited
from dilocox_jax.codecs.base import Codec as Codec
from dilocox_jax.codecs.base import Encoder as Encoder
from dilocox_jax.codecs.base import Projection as Projection
from dilocox_jax.codecs.base import Quantizer as Quantizer
from dilocox_jax.codecs.base import Reduced as Reduced
from dilocox_jax.codecs.named import named_codec as named_codec
from dilocox_jax.codecs.named import register_codec as register_codec
from dilocox_jax.config.mailbox_terms import mailbox_terms as mailbox_terms
from dilocox_jax.config.recipes import register_recipe as register_recipe
from dilocox_jax.config.run import RunConfig as RunConfig
from dilocox_jax.data.corpus import Corpus as Corpus
from dilocox_jax.data.sources import register_source as register_source
from dilocox_jax.distributed.partition_rules import divide_model as divide_model
from dilocox_jax.gap.expected import ExpectedGap as ExpectedGap
from dilocox_jax.gap.expected import expected_gap as expected_gap
from dilocox_jax.gap.law import Estimate as Estimate
from dilocox_jax.mailbox_protocol.agreement import (
  ReplicaStaleError as ReplicaStaleError,
)
from dilocox_jax.mailbox_protocol.agreement import StoppedError as StoppedError
from dilocox_jax.mailbox_protocol.mailbox import Mailbox as Mailbox
from dilocox_jax.mailbox_protocol.roster import MailboxRules as MailboxRules
from dilocox_jax.metrics.lines import RecordError as RecordError
from dilocox_jax.metrics.run_logs import LogStart as LogStart
from dilocox_jax.metrics.run_logs import RunLog as RunLog
from dilocox_jax.metrics.run_logs import register_log as register_log
from dilocox_jax.metrics.work_directory import BusyError as BusyError
from dilocox_jax.metrics.work_directory import RefusedError as RefusedError
from dilocox_jax.models.loss import LossModel as LossModel
from dilocox_jax.models.transformer import Model as Model
from dilocox_jax.optimizers import register_optimizer as register_optimizer
from dilocox_jax.outer.average import averaged as averaged
from dilocox_jax.outer.average import schedule_free as schedule_free
from dilocox_jax.outer.rules import ApplyRule as ApplyRule
from dilocox_jax.outer.step_state import outer_params as outer_params
from dilocox_jax.plan.model.adapters import Lora as Lora
from dilocox_jax.plan.model.division import Division as Division
from dilocox_jax.plan.model.presets import register_model as register_model
from dilocox_jax.plan.model.shapes import ModelShape as ModelShape
from dilocox_jax.plan.operations import Operation as Operation
from dilocox_jax.plan.operations import operation as operation
from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.plan.schedule.methods import Method as Method
from dilocox_jax.plan.schedule.methods import RuleKind as RuleKind
from dilocox_jax.plan.schedule.methods import register_method as register_method
from dilocox_jax.plan.schedule.methods import register_rule as register_rule
from dilocox_jax.plan.schedule.sync_schedule import Event as Event
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule as SyncSchedule
from dilocox_jax.rounds.exchanges import mailbox as mailbox
from dilocox_jax.rounds.late_joiner import join_rounds as join_rounds
from dilocox_jax.training.mailbox_replica import (
  MailboxAddress as MailboxAddress,
)
from dilocox_jax.training.states import (
  TrainingStoppedError as TrainingStoppedError,
)
from dilocox_jax.training.watching import FinishedRound as FinishedRound

__version__: str

__all__ = [
  "Aggregator",
  "ApplyRule",
  "Averaged",
  "BusyError",
  "Codec",
  "Collective",
  "Corpus",
  "Division",
  "Encoder",
  "Estimate",
  "Event",
  "ExpectedGap",
  "FinishedRound",
  "LogStart",
  "Lora",
  "LossModel",
  "Mailbox",
  "MailboxAddress",
  "MailboxRules",
  "Method",
  "Model",
  "ModelShape",
  "Operation",
  "Projection",
  "Quantizer",
  "RecordError",
  "Reduced",
  "RefusedError",
  "ReplicaStaleError",
  "RuleKind",
  "RunConfig",
  "RunLog",
  "Sender",
  "StoppedError",
  "SyncSchedule",
  "TrainingStoppedError",
  "allreduce",
  "averaged",
  "cocktail_sgd",
  "compare_methods",
  "delayed",
  "diloco",
  "dilocox",
  "divide_model",
  "eager",
  "encoded_bytes",
  "estimate",
  "exchange",
  "expected_gap",
  "growing_plans",
  "join_rounds",
  "limited",
  "load",
  "mailbox",
  "mailbox_terms",
  "make_rounds",
  "muloco",
  "named_codec",
  "norm_filter",
  "open_diloco",
  "operation",
  "outer_params",
  "overlap_loco",
  "register_codec",
  "register_collective",
  "register_log",
  "register_method",
  "register_model",
  "register_optimizer",
  "register_recipe",
  "register_rule",
  "register_source",
  "schedule_free",
  "sparse_loco",
  "step_transform",
  "streaming_diloco",
  "train",
]

def allreduce(
  inner: GradientTransformation,
  outer: GradientTransformation | None = None,
  *,
  codec: Codec | str | None = None,
  exchange: Aggregator | str | None = None,
  axis_name: str = "replica",
  fragments: Callable[[str], int] | Fragments | None = None,
  trainable: Callable[[str], bool] | None = None,
) -> GradientTransformationExtraArgs:
  """Averages the gradients of every step: plain data-parallel training.

  Source: the baseline of the papers of all other methods.

  The rank of a low-rank codec and H stay the same during training; only runs
  with a config can adapt them. A transform cannot hide transfers behind later
  steps; the rounds of `make_rounds` can.

  Args:
    inner: Optimizer of the inner steps.
    outer: Not read, because this method has no outer optimizer.
    codec: Codec or name of a codec. None: 'float32', as in the recipe of the
      method.
    exchange: Aggregator that averages over replicas. None: it is built from the
      codec and the error feedback of the method's recipe.
    axis_name: Name of the axis over which replicas are mapped.
    fragments: How the parameters are divided into fragments: a function from
      the path of a leaf to the number of its fragment, or a
      `plan.schedule.fragments.Fragments`. None: whole leaves are divided into
      fragments of about equal bytes, or every leaf is sliced if the method's
      fragments are slices.
    trainable: Function from the path of a leaf to whether the leaf is trained.
      None: all leaves are trained.

  Returns:
    An optax transform for one replica (`step_transform` says how to use it).

  Raises:
    TypeError: If an argument does not exist or has a wrong type.
    ValueError: If a value is wrong. The message is one line.
  """

def cocktail_sgd(
  inner: GradientTransformation,
  outer: GradientTransformation | None = None,
  *,
  codec: Codec | str | None = None,
  exchange: Aggregator | str | None = None,
  axis_name: str = "replica",
  fragments: Callable[[str], int] | Fragments | None = None,
  trainable: Callable[[str], bool] | None = None,
) -> GradientTransformationExtraArgs:
  """Averages compressed gradients in every step.

  The codec is in `config.recipes`: it draws some values of a gradient at
  random, and sends the largest of these.

  Source: Wang et al., 2023, "CocktailSGD", ICML.

  The rank of a low-rank codec and H stay the same during training; only runs
  with a config can adapt them. A transform cannot hide transfers behind later
  steps; the rounds of `make_rounds` can.

  Args:
    inner: Optimizer of the inner steps.
    outer: Not read, because this method has no outer optimizer.
    codec: Codec or name of a codec. None:
      'random_mask(fraction=0.1)+top_k(fraction=0.2,indices=bitmap)+int(bits=4)',
      as in the recipe of the method.
    exchange: Aggregator that averages over replicas. None: it is built from the
      codec and the error feedback of the method's recipe.
    axis_name: Name of the axis over which replicas are mapped.
    fragments: How the parameters are divided into fragments: a function from
      the path of a leaf to the number of its fragment, or a
      `plan.schedule.fragments.Fragments`. None: whole leaves are divided into
      fragments of about equal bytes, or every leaf is sliced if the method's
      fragments are slices.
    trainable: Function from the path of a leaf to whether the leaf is trained.
      None: all leaves are trained.

  Returns:
    An optax transform for one replica (`step_transform` says how to use it).

  Raises:
    TypeError: If an argument does not exist or has a wrong type.
    ValueError: If a value is wrong. The message is one line.
  """

def delayed(
  inner: GradientTransformation,
  outer: GradientTransformation | None = None,
  *,
  sync_interval: int = 30,
  num_fragments: int = 1,
  overlap_steps: int = 4,
  rule: str = "continue",
  mixing_alpha: float = 0.0,
  fragment_order: str = "strided",
  first_interval: int | None = None,
  steps_per_doubling: int | None = None,
  codec: Codec | str | None = None,
  exchange: Aggregator | str | None = None,
  axis_name: str = "replica",
  fragments: Callable[[str], int] | Fragments | None = None,
  trainable: Callable[[str], bool] | None = None,
) -> GradientTransformationExtraArgs:
  """Combines any schedule with any apply rule that works with the schedule.

  Source: the combination is ours, and every rule has its own source. With
  rule="continue" and outer SGD with learning rate 1 it is delayed model
  averaging of parts of the model, as in LOSCAR-SGD (arXiv 2605.20866).

  The rank of a low-rank codec and H stay the same during training; only runs
  with a config can adapt them. A transform cannot hide transfers behind later
  steps; the rounds of `make_rounds` can.

  Args:
    inner: Optimizer of the inner steps.
    outer: Optimizer of the outer parameters. None: `optax.sgd(0.7,
      momentum=0.6, nesterov=True)`.
    sync_interval: H (inner steps).
    num_fragments: Number of fragments, P.
    overlap_steps: tau (inner steps). It may exceed H if `rule` is "continue"
      and rounds do not grow.
    rule: How a replica goes on when a mean arrives: "reset", "continue", "mix"
      or "eager" (docs/methods.md).
    mixing_alpha: Weight of the replica's own parameters if `rule` is "mix", 0
      to 1. With the other rules it must be 0.
    fragment_order: How the parameters are divided among fragments, e.g.
      "strided" (`plan.schedule.fragments`).
    first_interval: Length of the first rounds (inner steps), if rounds grow.
    steps_per_doubling: Inner steps after which the length of rounds doubles, if
      they grow. Give both this and `first_interval`, or neither.
    codec: Codec or name of a codec. None: 'float32', as in the recipe of the
      method.
    exchange: Aggregator that averages over replicas. None: it is built from the
      codec and the error feedback of the method's recipe.
    axis_name: Name of the axis over which replicas are mapped.
    fragments: How the parameters are divided into fragments: a function from
      the path of a leaf to the number of its fragment, or a
      `plan.schedule.fragments.Fragments`. None: whole leaves are divided into
      fragments of about equal bytes, or every leaf is sliced if the method's
      fragments are slices.
    trainable: Function from the path of a leaf to whether the leaf is trained.
      None: all leaves are trained.

  Returns:
    An optax transform for one replica (`step_transform` says how to use it).

  Raises:
    TypeError: If an argument does not exist or has a wrong type.
    ValueError: If a value is wrong. The message is one line.
  """

def diloco(
  inner: GradientTransformation,
  outer: GradientTransformation | None = None,
  *,
  sync_interval: int = 30,
  first_interval: int | None = None,
  steps_per_doubling: int | None = None,
  codec: Codec | str | None = None,
  exchange: Aggregator | str | None = None,
  axis_name: str = "replica",
  fragments: Callable[[str], int] | Fragments | None = None,
  trainable: Callable[[str], bool] | None = None,
) -> GradientTransformationExtraArgs:
  """Averages pseudo-gradients every H steps, and waits for the mean.

  Source: Douillard et al., 2023, arXiv 2311.08105, Algorithm 1.

  The rank of a low-rank codec and H stay the same during training; only runs
  with a config can adapt them. A transform cannot hide transfers behind later
  steps; the rounds of `make_rounds` can.

  Args:
    inner: Optimizer of the inner steps.
    outer: Optimizer of the outer parameters. None: `optax.sgd(0.7,
      momentum=0.6, nesterov=True)`.
    sync_interval: H (inner steps).
    first_interval: Length of the first rounds (inner steps), if rounds grow.
    steps_per_doubling: Inner steps after which the length of rounds doubles, if
      they grow. Give both this and `first_interval`, or neither.
    codec: Codec or name of a codec. None: 'float32', as in the recipe of the
      method.
    exchange: Aggregator that averages over replicas. None: it is built from the
      codec and the error feedback of the method's recipe.
    axis_name: Name of the axis over which replicas are mapped.
    fragments: How the parameters are divided into fragments: a function from
      the path of a leaf to the number of its fragment, or a
      `plan.schedule.fragments.Fragments`. None: whole leaves are divided into
      fragments of about equal bytes, or every leaf is sliced if the method's
      fragments are slices.
    trainable: Function from the path of a leaf to whether the leaf is trained.
      None: all leaves are trained.

  Returns:
    An optax transform for one replica (`step_transform` says how to use it).

  Raises:
    TypeError: If an argument does not exist or has a wrong type.
    ValueError: If a value is wrong. The message is one line.
  """

def dilocox(
  inner: GradientTransformation,
  outer: GradientTransformation | None = None,
  *,
  sync_interval: int = 30,
  rule: str = "continue",
  first_interval: int | None = None,
  steps_per_doubling: int | None = None,
  codec: Codec | str | None = None,
  exchange: Aggregator | str | None = None,
  axis_name: str = "replica",
  fragments: Callable[[str], int] | Fragments | None = None,
  trainable: Callable[[str], bool] | None = None,
) -> GradientTransformationExtraArgs:
  """Applies a mean one round late, so the next H steps hide the exchange.

  The compression of the method, low-rank factors with error feedback, is in
  `config.recipes`.

  Source: Qi et al., 2025, arXiv 2506.21263, one-step-delay overlap.
  Differs: the paper does not say what happens to the progress that a replica
  makes during the delay. The rule "reset" drops it from the replica, "continue"
  keeps it (docs/methods.md). The residual of error feedback is what the codec
  lost of the replica's own message. In the paper's Algorithm 2 it is the
  difference between the replica's pseudo-gradient and the mean (this is from
  memory).

  The rank of a low-rank codec and H stay the same during training; only runs
  with a config can adapt them. A transform cannot hide transfers behind later
  steps; the rounds of `make_rounds` can.

  Args:
    inner: Optimizer of the inner steps.
    outer: Optimizer of the outer parameters. None: `optax.sgd(0.7,
      momentum=0.6, nesterov=True)`.
    sync_interval: H (inner steps), which is also the delay.
    rule: "continue" or "reset".
    first_interval: Length of the first rounds (inner steps), if rounds grow.
    steps_per_doubling: Inner steps after which the length of rounds doubles, if
      they grow. Give both this and `first_interval`, or neither.
    codec: Codec or name of a codec. None: 'low_rank(rank=16)+int(bits=4)', as
      in the recipe of the method.
    exchange: Aggregator that averages over replicas. None: it is built from the
      codec and the error feedback of the method's recipe.
    axis_name: Name of the axis over which replicas are mapped.
    fragments: How the parameters are divided into fragments: a function from
      the path of a leaf to the number of its fragment, or a
      `plan.schedule.fragments.Fragments`. None: whole leaves are divided into
      fragments of about equal bytes, or every leaf is sliced if the method's
      fragments are slices.
    trainable: Function from the path of a leaf to whether the leaf is trained.
      None: all leaves are trained.

  Returns:
    An optax transform for one replica (`step_transform` says how to use it).

  Raises:
    TypeError: If an argument does not exist or has a wrong type.
    ValueError: If a value is wrong. The message is one line.
  """

def eager(
  inner: GradientTransformation,
  outer: GradientTransformation | None = None,
  *,
  sync_interval: int = 30,
  num_fragments: int = 1,
  first_interval: int | None = None,
  steps_per_doubling: int | None = None,
  codec: Codec | str | None = None,
  exchange: Aggregator | str | None = None,
  axis_name: str = "replica",
  fragments: Callable[[str], int] | Fragments | None = None,
  trainable: Callable[[str], bool] | None = None,
) -> GradientTransformationExtraArgs:
  """Applies a replica's own pseudo-gradient at once, the others' a round late.

  The outer step takes the mean of the pseudo-gradients of the round before. In
  this mean each replica replaces its own older pseudo-gradient by its newest.

  Source: Kale et al., 2025, arXiv 2502.12996, eager updates.

  The rank of a low-rank codec and H stay the same during training; only runs
  with a config can adapt them. A transform cannot hide transfers behind later
  steps; the rounds of `make_rounds` can.

  Args:
    inner: Optimizer of the inner steps.
    outer: Optimizer of the outer parameters. None: `optax.sgd(0.7,
      momentum=0.6, nesterov=True)`.
    sync_interval: H (inner steps), which is also the delay.
    num_fragments: Number of fragments (parts of the parameters), P. The paper
      has 1. If rounds grow, it must be 1.
    first_interval: Length of the first rounds (inner steps), if rounds grow.
    steps_per_doubling: Inner steps after which the length of rounds doubles, if
      they grow. Give both this and `first_interval`, or neither.
    codec: Codec or name of a codec. None: 'float32', as in the recipe of the
      method.
    exchange: Aggregator that averages over replicas. None: it is built from the
      codec and the error feedback of the method's recipe.
    axis_name: Name of the axis over which replicas are mapped.
    fragments: How the parameters are divided into fragments: a function from
      the path of a leaf to the number of its fragment, or a
      `plan.schedule.fragments.Fragments`. None: whole leaves are divided into
      fragments of about equal bytes, or every leaf is sliced if the method's
      fragments are slices.
    trainable: Function from the path of a leaf to whether the leaf is trained.
      None: all leaves are trained.

  Returns:
    An optax transform for one replica (`step_transform` says how to use it).

  Raises:
    TypeError: If an argument does not exist or has a wrong type.
    ValueError: If a value is wrong. The message is one line.
  """

def muloco(
  inner: GradientTransformation,
  outer: GradientTransformation | None = None,
  *,
  sync_interval: int = 30,
  first_interval: int | None = None,
  steps_per_doubling: int | None = None,
  codec: Codec | str | None = None,
  exchange: Aggregator | str | None = None,
  axis_name: str = "replica",
  fragments: Callable[[str], int] | Fragments | None = None,
  trainable: Callable[[str], bool] | None = None,
) -> GradientTransformationExtraArgs:
  """Averages pseudo-gradients of Muon every H steps, in few bits.

  Muon as the inner optimizer, a codec of 2 bits, and error feedback are in
  `config.recipes`.

  Source: Therien et al., 2025, arXiv 2505.23725.

  The rank of a low-rank codec and H stay the same during training; only runs
  with a config can adapt them. A transform cannot hide transfers behind later
  steps; the rounds of `make_rounds` can.

  Args:
    inner: Optimizer of the inner steps.
    outer: Optimizer of the outer parameters. None: `optax.sgd(0.7,
      momentum=0.6, nesterov=True)`.
    sync_interval: H (inner steps).
    first_interval: Length of the first rounds (inner steps), if rounds grow.
    steps_per_doubling: Inner steps after which the length of rounds doubles, if
      they grow. Give both this and `first_interval`, or neither.
    codec: Codec or name of a codec. None: 'int(bits=2)', as in the recipe of
      the method.
    exchange: Aggregator that averages over replicas. None: it is built from the
      codec and the error feedback of the method's recipe.
    axis_name: Name of the axis over which replicas are mapped.
    fragments: How the parameters are divided into fragments: a function from
      the path of a leaf to the number of its fragment, or a
      `plan.schedule.fragments.Fragments`. None: whole leaves are divided into
      fragments of about equal bytes, or every leaf is sliced if the method's
      fragments are slices.
    trainable: Function from the path of a leaf to whether the leaf is trained.
      None: all leaves are trained.

  Returns:
    An optax transform for one replica (`step_transform` says how to use it).

  Raises:
    TypeError: If an argument does not exist or has a wrong type.
    ValueError: If a value is wrong. The message is one line.
  """

def open_diloco(
  inner: GradientTransformation,
  outer: GradientTransformation | None = None,
  *,
  sync_interval: int = 30,
  first_interval: int | None = None,
  steps_per_doubling: int | None = None,
  codec: Codec | str | None = None,
  exchange: Aggregator | str | None = None,
  axis_name: str = "replica",
  fragments: Callable[[str], int] | Fragments | None = None,
  trainable: Callable[[str], bool] | None = None,
) -> GradientTransformationExtraArgs:
  """Averages pseudo-gradients every H steps as DiLoCo does, but in fp16.

  The codec and the outer optimizer are in `config.recipes`.

  Source: Jaghouar et al., 2024, arXiv 2407.07852.

  The rank of a low-rank codec and H stay the same during training; only runs
  with a config can adapt them. A transform cannot hide transfers behind later
  steps; the rounds of `make_rounds` can.

  Args:
    inner: Optimizer of the inner steps.
    outer: Optimizer of the outer parameters. None: `optax.sgd(0.7,
      momentum=0.9, nesterov=True)`.
    sync_interval: H (inner steps); the paper has 500.
    first_interval: Length of the first rounds (inner steps), if rounds grow.
    steps_per_doubling: Inner steps after which the length of rounds doubles, if
      they grow. Give both this and `first_interval`, or neither.
    codec: Codec or name of a codec. None: 'float16', as in the recipe of the
      method.
    exchange: Aggregator that averages over replicas. None: it is built from the
      codec and the error feedback of the method's recipe.
    axis_name: Name of the axis over which replicas are mapped.
    fragments: How the parameters are divided into fragments: a function from
      the path of a leaf to the number of its fragment, or a
      `plan.schedule.fragments.Fragments`. None: whole leaves are divided into
      fragments of about equal bytes, or every leaf is sliced if the method's
      fragments are slices.
    trainable: Function from the path of a leaf to whether the leaf is trained.
      None: all leaves are trained.

  Returns:
    An optax transform for one replica (`step_transform` says how to use it).

  Raises:
    TypeError: If an argument does not exist or has a wrong type.
    ValueError: If a value is wrong. The message is one line.
  """

def overlap_loco(
  inner: GradientTransformation,
  outer: GradientTransformation | None = None,
  *,
  sync_interval: int = 16,
  num_fragments: int | None = None,
  fragment_order: str = "sliced",
  first_interval: int | None = None,
  steps_per_doubling: int | None = None,
  codec: Codec | str | None = None,
  exchange: Aggregator | str | None = None,
  axis_name: str = "replica",
  fragments: Callable[[str], int] | Fragments | None = None,
  trainable: Callable[[str], bool] | None = None,
) -> GradientTransformationExtraArgs:
  """Sends equal slices of the parameters in turn, one every H / P steps.

  While a slice is exchanged, the replicas take the inner steps until the next
  slice is sent. So each mean is applied H / P steps late, and replicas keep the
  progress that they make meanwhile. The other parts of the method are in
  `config.recipes`: Muon as inner optimizer, one bit per value with error
  feedback, and SGD with learning rate 1 as outer optimizer.

  Source: ours. It combines the fragments of Streaming DiLoCo (arXiv
  2501.18512), the delay of DiLoCoX (arXiv 2506.21263), the rule "continue" of
  LOSCAR-SGD (arXiv 2605.20866), and the inner optimizer of MuLoCo (arXiv
  2505.23725). The fixed slices, and one bit with feedback, are ours.

  The rank of a low-rank codec and H stay the same during training; only runs
  with a config can adapt them. A transform cannot hide transfers behind later
  steps; the rounds of `make_rounds` can.

  Args:
    inner: Optimizer of the inner steps.
    outer: Optimizer of the outer parameters. None: `optax.sgd(1.0)`.
    sync_interval: H (inner steps), best a multiple of P.
    num_fragments: Number of slices, P. None: 16, or the length of the first
      rounds if that is less.
    fragment_order: "sliced", or "interleaved" for replicas of many devices.
    first_interval: Length of the first rounds (inner steps), if rounds grow.
    steps_per_doubling: Inner steps after which the length of rounds doubles, if
      they grow. Give both this and `first_interval`, or neither.
    codec: Codec or name of a codec. None: 'int(bits=1)', as in the recipe of
      the method.
    exchange: Aggregator that averages over replicas. None: it is built from the
      codec and the error feedback of the method's recipe.
    axis_name: Name of the axis over which replicas are mapped.
    fragments: How the parameters are divided into fragments: a function from
      the path of a leaf to the number of its fragment, or a
      `plan.schedule.fragments.Fragments`. None: whole leaves are divided into
      fragments of about equal bytes, or every leaf is sliced if the method's
      fragments are slices.
    trainable: Function from the path of a leaf to whether the leaf is trained.
      None: all leaves are trained.

  Returns:
    An optax transform for one replica (`step_transform` says how to use it).

  Raises:
    TypeError: If an argument does not exist or has a wrong type.
    ValueError: If a value is wrong. The message is one line.
  """

def sparse_loco(
  inner: GradientTransformation,
  outer: GradientTransformation | None = None,
  *,
  sync_interval: int = 30,
  first_interval: int | None = None,
  steps_per_doubling: int | None = None,
  codec: Codec | str | None = None,
  exchange: Aggregator | str | None = None,
  axis_name: str = "replica",
  fragments: Callable[[str], int] | Fragments | None = None,
  trainable: Callable[[str], bool] | None = None,
) -> GradientTransformationExtraArgs:
  """Averages the largest values of pseudo-gradients every H steps.

  The codec, the error feedback and the outer optimizer (SGD without momentum)
  are in `config.recipes`.

  Source: Sarfi et al., 2025, arXiv 2508.15706.

  The rank of a low-rank codec and H stay the same during training; only runs
  with a config can adapt them. A transform cannot hide transfers behind later
  steps; the rounds of `make_rounds` can.

  Args:
    inner: Optimizer of the inner steps.
    outer: Optimizer of the outer parameters. None: `optax.sgd(1.0)`.
    sync_interval: H (inner steps).
    first_interval: Length of the first rounds (inner steps), if rounds grow.
    steps_per_doubling: Inner steps after which the length of rounds doubles, if
      they grow. Give both this and `first_interval`, or neither.
    codec: Codec or name of a codec. None:
      'top_k(fraction=0.015625,block_size=4096)+int(bits=2,scale=tensor)', as
      in the recipe of the method.
    exchange: Aggregator that averages over replicas. None: it is built from the
      codec and the error feedback of the method's recipe.
    axis_name: Name of the axis over which replicas are mapped.
    fragments: How the parameters are divided into fragments: a function from
      the path of a leaf to the number of its fragment, or a
      `plan.schedule.fragments.Fragments`. None: whole leaves are divided into
      fragments of about equal bytes, or every leaf is sliced if the method's
      fragments are slices.
    trainable: Function from the path of a leaf to whether the leaf is trained.
      None: all leaves are trained.

  Returns:
    An optax transform for one replica (`step_transform` says how to use it).

  Raises:
    TypeError: If an argument does not exist or has a wrong type.
    ValueError: If a value is wrong. The message is one line.
  """

def streaming_diloco(
  inner: GradientTransformation,
  outer: GradientTransformation | None = None,
  *,
  sync_interval: int = 30,
  num_fragments: int = 3,
  overlap_steps: int = 4,
  mixing_alpha: float = 0.5,
  fragment_order: str = "strided",
  first_interval: int | None = None,
  steps_per_doubling: int | None = None,
  codec: Codec | str | None = None,
  exchange: Aggregator | str | None = None,
  axis_name: str = "replica",
  fragments: Callable[[str], int] | Fragments | None = None,
  trainable: Callable[[str], bool] | None = None,
) -> GradientTransformationExtraArgs:
  """Averages fragment after fragment, and applies each mean tau steps late.

  A fragment is one of P parts of the parameters. When its mean arrives, a
  replica mixes its own parameters with the new outer parameters.

  Source: Douillard et al., 2025, arXiv 2501.18512, Algorithm 2.

  The rank of a low-rank codec and H stay the same during training; only runs
  with a config can adapt them. A transform cannot hide transfers behind later
  steps; the rounds of `make_rounds` can.

  Args:
    inner: Optimizer of the inner steps.
    outer: Optimizer of the outer parameters. None: `optax.sgd(0.7,
      momentum=0.6, nesterov=True)`.
    sync_interval: H (inner steps) between sends of one fragment.
    num_fragments: Number of fragments, P.
    overlap_steps: tau (inner steps), less than H.
    mixing_alpha: Weight of the replica's own parameters in the mixture, 0 to 1.
    fragment_order: How the parameters are divided among fragments. The paper
      has "strided" and "sequential". "sliced" and "interleaved" are possible,
      too (`plan.schedule.fragments`).
    first_interval: Length of the first rounds (inner steps), if rounds grow.
    steps_per_doubling: Inner steps after which the length of rounds doubles, if
      they grow. Give both this and `first_interval`, or neither.
    codec: Codec or name of a codec. None: 'e3m0', as in the recipe of the
      method.
    exchange: Aggregator that averages over replicas. None: it is built from the
      codec and the error feedback of the method's recipe.
    axis_name: Name of the axis over which replicas are mapped.
    fragments: How the parameters are divided into fragments: a function from
      the path of a leaf to the number of its fragment, or a
      `plan.schedule.fragments.Fragments`. None: whole leaves are divided into
      fragments of about equal bytes, or every leaf is sliced if the method's
      fragments are slices.
    trainable: Function from the path of a leaf to whether the leaf is trained.
      None: all leaves are trained.

  Returns:
    An optax transform for one replica (`step_transform` says how to use it).

  Raises:
    TypeError: If an argument does not exist or has a wrong type.
    ValueError: If a value is wrong. The message is one line.
  """
