"""The named methods: their schedules, and how replicas apply the means.

A `Method` is a schedule, and the rule by which a replica applies the averaged
pseudo-gradient. The function that builds a named method takes only the settings
that the method leaves open. The codec, the optimizers and the error feedback of
a named method are its *recipe* (`config.recipes`).
"""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from dilocox_jax.checks import (
  check_limits,
  did_you_mean,
  in_front,
  limited,
  of_type,
  printable,
  require,
  shown,
)
from dilocox_jax.plan.choices import Lazy, Registry, check_lazy, parts_of
from dilocox_jax.plan.schedule.fragments import ORDERS
from dilocox_jax.plan.schedule.growing_schedule import schedule_of
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule


@dataclasses.dataclass(frozen=True)
class RuleKind:
  """How to build an apply rule, and the schedules with which it works.

  An apply rule says with which parameters a replica continues when an averaged
  pseudo-gradient arrives.

  Attributes:
    build: Function from the `Method` and the name of the replica axis to an
      `outer.rules.ApplyRule`; or where to import it from, as "module:name".
    allows: Function (H, tau) -> whether the rule works with rounds of H inner
      steps and a delay of tau inner steps.
    says: How the error message "overlap_steps=8 must ..." goes on if `allows`
      returns False. "{}" in it is replaced by, for example, "sync_interval=4".
    reads_alpha: Whether the rule reads `Method.mixing_alpha`. If not, a
      `mixing_alpha` other than 0 is refused.
  """

  build: Lazy
  allows: Callable[[int, int], bool] = lambda interval, overlap: True
  says: str = "any"
  reads_alpha: bool = True


RULES: Registry[RuleKind] = Registry("rule")


def register_rule(name: str, kind: RuleKind) -> None:
  """Registers an apply rule, so that a config can name it in `sync.rule`.

  Args:
    name: The name, e.g. "reset".
    kind: The function that builds the rule, and the schedules that it allows.

  Raises:
    ValueError: If the name is taken or is no identifier, `kind` is no
      `RuleKind`, or `kind.build` is neither a function nor a "module:name".
  """
  is_kind = isinstance(kind, RuleKind)
  require(is_kind, f"rule {name!r}: {shown(kind)} must be a RuleKind")
  check_lazy(f"rule {name!r}: build", kind.build)
  RULES.add(name, kind)


for _name, _kind in {
  "reset": RuleKind(
    "dilocox_jax.outer.rules:reset_rule",
    lambda interval, overlap: overlap <= interval,
    "not exceed {} under rule='reset'; rule='continue' allows it",
    reads_alpha=False,
  ),
  "continue": RuleKind(
    "dilocox_jax.outer.rules:continue_rule", reads_alpha=False
  ),
  "mix": RuleKind(
    "dilocox_jax.outer.rules:mix_rule",
    lambda interval, overlap: overlap < interval,
    "be less than {} where replicas mix (streaming)",
  ),
  "eager": RuleKind(
    "dilocox_jax.outer.rules:eager_rule",
    lambda interval, overlap: overlap == interval,
    "equal {} under rule='eager'",
    reads_alpha=False,
  ),
}.items():
  register_rule(_name, _kind)


@dataclasses.dataclass(frozen=True)
class Method:
  """Says what replicas average and when, and how they continue with the mean.

  Attributes:
    schedule: After which inner steps fragments (parts of the parameters) are
      sent and their means applied.
    rule: Name of the apply rule: "reset", "continue", "mix", "eager", or a
      registered one. It says with which parameters a replica continues when a
      mean arrives (docs/methods.md).
    mixing_alpha: Weight of the replica's own parameters under the rule "mix", 0
      to 1. With 1 the mean has no effect on the replica. Under "reset",
      "continue" and "eager" it must be 0.
    exchanged: What is averaged: "pseudo_gradient"; or "gradient" for methods
      that average the gradients of every step, and give the mean to the inner
      optimizer.
    fragment_order: How the parameters are divided among fragments:
      "sequential", "strided", "sliced" or "interleaved"
      (`plan.schedule.fragments`).
  """

  schedule: SyncSchedule
  rule: str = limited("reset", choices=RULES)
  mixing_alpha: float = limited(0.0, at_least=0, at_most=1)
  exchanged: str = limited(
    "pseudo_gradient", choices=("pseudo_gradient", "gradient")
  )
  fragment_order: str = limited("strided", choices=ORDERS)

  def __post_init__(self):
    """Raises ValueError if a field is outside its limits or would be ignored.

    It also does so if the rule does not work with the schedule.
    """
    require(
      isinstance(self.schedule, SyncSchedule),
      f"schedule={shown(self.schedule)} must be a SyncSchedule",
    )
    # `check_limits` takes None for a field that is left unset.
    of_type("rule", self.rule, str)
    of_type("mixing_alpha", self.mixing_alpha, float)
    of_type("exchanged", self.exchanged, str)
    check_limits(self)
    # A subclass of `SyncSchedule` from outside may declare limits.
    check_limits(self.schedule)
    interval = self.schedule.sync_interval
    overlap = self.schedule.overlap_steps
    rule = RULES[self.rule]
    named_interval = f"sync_interval={interval}"
    require(
      rule.allows(interval, overlap),
      f"overlap_steps={overlap} must {rule.says.format(named_interval)}",
    )
    require(
      rule.reads_alpha or not self.mixing_alpha,
      f"mixing_alpha={self.mixing_alpha} would be ignored by rule "
      f"{self.rule!r}: drop it, or take rule 'mix'",
    )

  @property
  def can_keep_unsent(self) -> bool:
    """Whether `exchange.keep_unsent` is allowed with this method.

    With this field of a config, the part of a pseudo-gradient that the codec
    did not send stays in the replica's parameters, and is measured again at the
    next send. A method that averages pseudo-gradients allows it with the rule
    "continue". With the rule "reset" it allows it if means are applied without
    a delay (tau = 0).
    """
    if self.exchanged != "pseudo_gradient":
      return False
    if self.rule == "continue":
      return True
    return self.rule == "reset" and self.schedule.overlap_steps == 0


Build = TypeVar("Build", bound=Callable[..., Method])

METHODS: Registry[Callable[..., Method]] = Registry("method")
_CHECKED_ROUNDS = 4  # Rounds of a new method's schedule that are checked.


def register_method(build: Build) -> Build:
  """Registers a method under the name of the function that builds it.

  It can be used as a decorator of that function.

  Args:
    build: Function that returns a `Method`. Its arguments are the settings of a
      config's section `sync` that it needs, each with a default.

  Returns:
    `build`.

  Raises:
    ValueError: If `build` is no function that returns a `Method`, if its name
      is taken or is no identifier, if the method refuses its own defaults, or
      if the first rounds of its schedule do not have the indices 0, 1, 2 and 3.
  """
  name = getattr(build, "__name__", shown(build))
  with in_front(f"method {name!r}: "):
    require(callable(build), "it must be a function that returns a Method")
    method = build()
    require(
      isinstance(method, Method),
      f"the function returns {shown(method)} and no Method",
    )
    _check_schedule(method.schedule)
  METHODS.add(name, build)
  return build


def _check_schedule(schedule: SyncSchedule) -> None:
  """Raises ValueError unless a schedule numbers its rounds 0, 1, 2, ...

  Only the first rounds are checked.
  """
  step = 0
  for expected_index in range(_CHECKED_ROUNDS):
    index, num_steps = schedule.round_at(step)
    require(
      index == expected_index,
      f"round_at({step}) has index {index} instead of {expected_index}",
    )
    step += num_steps


@register_method
def allreduce() -> Method:
  """Averages the gradients of every step: plain data-parallel training.

  Source: the baseline of the papers of all other methods.
  """
  return Method(SyncSchedule(1), exchanged="gradient")


@register_method
def cocktail_sgd() -> Method:
  """Averages compressed gradients in every step.

  The codec is in `config.recipes`: it draws some values of a gradient at
  random, and sends the largest of these.

  Source: Wang et al., 2023, "CocktailSGD", ICML.
  """
  return allreduce()


@register_method
def diloco(
  sync_interval: int = 30,
  first_interval: int | None = None,
  steps_per_doubling: int | None = None,
) -> Method:
  """Averages pseudo-gradients every H steps, and waits for the mean.

  Source: Douillard et al., 2023, arXiv 2311.08105, Algorithm 1.

  Args:
    sync_interval: H (inner steps).
    first_interval: Length of the first rounds (inner steps), if rounds grow.
    steps_per_doubling: Inner steps after which the length of rounds doubles, if
      they grow. Give both this and `first_interval`, or neither.
  """
  schedule = schedule_of(
    sync_interval,
    first_interval=first_interval,
    steps_per_doubling=steps_per_doubling,
  )
  return Method(schedule)


@register_method
def open_diloco(
  sync_interval: int = 30,
  first_interval: int | None = None,
  steps_per_doubling: int | None = None,
) -> Method:
  """Averages pseudo-gradients every H steps as DiLoCo does, but in fp16.

  The codec and the outer optimizer are in `config.recipes`.

  Source: Jaghouar et al., 2024, arXiv 2407.07852.

  Args:
    sync_interval: H (inner steps); the paper has 500.
    first_interval: Length of the first rounds (inner steps), if rounds grow.
    steps_per_doubling: Inner steps after which the length of rounds doubles, if
      they grow. Give both this and `first_interval`, or neither.
  """
  return diloco(sync_interval, first_interval, steps_per_doubling)


@register_method
def sparse_loco(
  sync_interval: int = 30,
  first_interval: int | None = None,
  steps_per_doubling: int | None = None,
) -> Method:
  """Averages the largest values of pseudo-gradients every H steps.

  The codec, the error feedback and the outer optimizer (SGD without momentum)
  are in `config.recipes`.

  Source: Sarfi et al., 2025, arXiv 2508.15706.

  Args:
    sync_interval: H (inner steps).
    first_interval: Length of the first rounds (inner steps), if rounds grow.
    steps_per_doubling: Inner steps after which the length of rounds doubles, if
      they grow. Give both this and `first_interval`, or neither.
  """
  return diloco(sync_interval, first_interval, steps_per_doubling)


@register_method
def muloco(
  sync_interval: int = 30,
  first_interval: int | None = None,
  steps_per_doubling: int | None = None,
) -> Method:
  """Averages pseudo-gradients of Muon every H steps, in few bits.

  Muon as the inner optimizer, a codec of 2 bits, and error feedback are in
  `config.recipes`.

  Source: Therien et al., 2025, arXiv 2505.23725.

  Args:
    sync_interval: H (inner steps).
    first_interval: Length of the first rounds (inner steps), if rounds grow.
    steps_per_doubling: Inner steps after which the length of rounds doubles, if
      they grow. Give both this and `first_interval`, or neither.
  """
  return diloco(sync_interval, first_interval, steps_per_doubling)


@register_method
def streaming_diloco(
  sync_interval: int = 30,
  num_fragments: int = 3,
  overlap_steps: int = 4,
  mixing_alpha: float = 0.5,
  fragment_order: str = "strided",
  first_interval: int | None = None,
  steps_per_doubling: int | None = None,
) -> Method:
  """Averages fragment after fragment, and applies each mean tau steps late.

  A fragment is one of P parts of the parameters. When its mean arrives, a
  replica mixes its own parameters with the new outer parameters.

  Source: Douillard et al., 2025, arXiv 2501.18512, Algorithm 2.

  Args:
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
  """
  schedule = schedule_of(
    sync_interval,
    num_fragments,
    overlap_steps,
    first_interval=first_interval,
    steps_per_doubling=steps_per_doubling,
  )
  return Method(
    schedule,
    rule="mix",
    mixing_alpha=mixing_alpha,
    fragment_order=fragment_order,
  )


@register_method
def eager(
  sync_interval: int = 30,
  num_fragments: int = 1,
  first_interval: int | None = None,
  steps_per_doubling: int | None = None,
) -> Method:
  """Applies a replica's own pseudo-gradient at once, the others' a round late.

  The outer step takes the mean of the pseudo-gradients of the round before. In
  this mean each replica replaces its own older pseudo-gradient by its newest.

  Source: Kale et al., 2025, arXiv 2502.12996, eager updates.

  Args:
    sync_interval: H (inner steps), which is also the delay.
    num_fragments: Number of fragments (parts of the parameters), P. The paper
      has 1. If rounds grow, it must be 1.
    first_interval: Length of the first rounds (inner steps), if rounds grow.
    steps_per_doubling: Inner steps after which the length of rounds doubles, if
      they grow. Give both this and `first_interval`, or neither.
  """
  schedule = schedule_of(
    sync_interval,
    num_fragments,
    overlap_steps=sync_interval,
    first_interval=first_interval,
    steps_per_doubling=steps_per_doubling,
  )
  return Method(schedule, rule="eager")


@register_method
def dilocox(
  sync_interval: int = 30,
  rule: str = "continue",
  first_interval: int | None = None,
  steps_per_doubling: int | None = None,
) -> Method:
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

  Args:
    sync_interval: H (inner steps), which is also the delay.
    rule: "continue" or "reset".
    first_interval: Length of the first rounds (inner steps), if rounds grow.
    steps_per_doubling: Inner steps after which the length of rounds doubles, if
      they grow. Give both this and `first_interval`, or neither.
  """
  schedule = schedule_of(
    sync_interval,
    num_fragments=1,
    overlap_steps=sync_interval,
    first_interval=first_interval,
    steps_per_doubling=steps_per_doubling,
  )
  return Method(schedule, rule=rule)


@register_method
def delayed(
  sync_interval: int = 30,
  num_fragments: int = 1,
  overlap_steps: int = 4,
  rule: str = "continue",
  mixing_alpha: float = 0.0,
  fragment_order: str = "strided",
  first_interval: int | None = None,
  steps_per_doubling: int | None = None,
) -> Method:
  """Combines any schedule with any apply rule that works with the schedule.

  Source: the combination is ours, and every rule has its own source. With
  rule="continue" and outer SGD with learning rate 1 it is delayed model
  averaging of parts of the model, as in LOSCAR-SGD (arXiv 2605.20866).

  Args:
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
  """
  schedule = schedule_of(
    sync_interval,
    num_fragments,
    overlap_steps,
    first_interval=first_interval,
    steps_per_doubling=steps_per_doubling,
  )
  return Method(
    schedule,
    rule=rule,
    mixing_alpha=mixing_alpha,
    fragment_order=fragment_order,
  )


@register_method
def overlap_loco(
  sync_interval: int = 16,
  num_fragments: int | None = None,
  fragment_order: str = "sliced",
  first_interval: int | None = None,
  steps_per_doubling: int | None = None,
) -> Method:
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

  Args:
    sync_interval: H (inner steps), best a multiple of P.
    num_fragments: Number of slices, P. None: 16, or the length of the first
      rounds if that is less.
    fragment_order: "sliced", or "interleaved" for replicas of many devices.
    first_interval: Length of the first rounds (inner steps), if rounds grow.
    steps_per_doubling: Inner steps after which the length of rounds doubles, if
      they grow. Give both this and `first_interval`, or neither.
  """
  if num_fragments is None:
    num_fragments = min(16, first_interval or sync_interval)
  # max(..., 1) avoids a division by 0; `SyncSchedule` refuses 0 fragments.
  overlap_steps = max(sync_interval // max(num_fragments, 1), 1)
  schedule = schedule_of(
    sync_interval,
    num_fragments,
    overlap_steps,
    first_interval=first_interval,
    steps_per_doubling=steps_per_doubling,
  )
  return Method(schedule, rule="continue", fragment_order=fragment_order)


def method_parts(text: str) -> tuple[str, dict[str, Any]]:
  """Parses a text such as "diloco(sync_interval=8)".

  The example gives "diloco" and {"sync_interval": 8}. The method need not
  exist. Raises ValueError if the text cannot be parsed.
  """
  try:
    ((name, settings),) = parts_of(text)
  except ValueError as error:
    raise ValueError(
      f"method={text!r} must be a name, with settings behind it if it has any, "
      "as in 'streaming_diloco(num_fragments=2)'"
    ) from error
  return name, settings


def named_method(text: str, **settings: int | float | str | None) -> Method:
  """Builds a method by name.

  Args:
    text: Name of a registered method. Settings may follow it, as in
      "diloco(sync_interval=8)".
    **settings: Values of settings by name. None leaves the method's default.

  Raises:
    ValueError: If the text cannot be parsed, or if no method has the name.
      If the method lacks a setting, or refuses its value. If a setting is both
      in the text and in `settings`.
  """
  name, settings_in_text = method_parts(text)
  if name not in METHODS:
    hint = did_you_mean(name, METHODS)
    raise ValueError(f"method={name!r} is not known: {hint}")
  build = METHODS[name]
  parameters = list(inspect.signature(build).parameters)
  arguments = {
    key: value for key, value in settings.items() if value is not None
  }
  for key in arguments.keys() & settings_in_text.keys():
    raise ValueError(f"{key} is set twice, in method={text!r} too: drop one")
  arguments |= settings_in_text
  types = typing.get_type_hints(build)
  for key, value in arguments.items():
    if key not in parameters:
      known_names = ", ".join(parameters) or "none"
      raise ValueError(
        f"{key}={printable(str(value))} is not a setting of method {name!r} "
        f"(it has: {known_names}); {_advice(key, parameters)}"
      )
    # Settings of other types are left to the method, which may check them.
    if _is_plain(types.get(key)):
      arguments[key] = of_type(key, value, types[key])
  return build(**arguments)


_PLAIN_TYPES = {int, float, str, bool, type(None)}


def _is_plain(hint: Any) -> bool:
  """Returns whether a type is int, float, str, bool, None or a union of these.

  `hint` is None if the function states no type: then the result is False.
  """
  if not hint:
    return False
  members = typing.get_args(hint) or (hint,)
  return set(members) <= _PLAIN_TYPES


def _advice(key: str, parameters: Iterable[str]) -> str:
  """Returns what to do about a setting that a method lacks, e.g. "drop it"."""
  if key in inspect.signature(delayed).parameters:
    return "drop it or take method 'delayed'"
  hint = did_you_mean(key, parameters)
  # Without a similar name the hint lists all names, as the caller's message
  # already does.
  if hint.startswith("did"):
    return hint
  return "drop it"


def takes(text: str, setting: str) -> bool:
  """Returns whether a method exists and has a setting.

  Args:
    text: Name of a method, known or not. Settings may follow it, as in
      "diloco(sync_interval=8)". Empty: the result is False.
    setting: Name of the setting.

  Raises:
    ValueError: If the text cannot be parsed, e.g. "diloco(".
  """
  if not text:
    return False
  name, _ = method_parts(text)
  if name not in METHODS:
    return False
  return setting in inspect.signature(METHODS[name]).parameters


def with_interval(method: Method, sync_interval: int) -> Method:
  """Returns a method with another H, the number of inner steps of a round.

  A delay of one round stays a delay of one round.

  Args:
    method: A method with one fragment and with rounds of equal length. Its
      delay must be 0 or one round.
    sync_interval: The new H (inner steps).

  Raises:
    ValueError: If `method` is not of this kind.
  """
  old = method.schedule
  has_whole_delay = old.overlap_steps == old.sync_interval
  has_known_delay = old.overlap_steps == 0 or has_whole_delay
  if old.num_fragments != 1 or not has_known_delay or not old.is_regular:
    raise ValueError(
      f"num_fragments={old.num_fragments}, overlap_steps={old.overlap_steps}: "
      "sync_interval can adapt only with one fragment and no delay or that of "
      "a whole round, and with rounds of one length"
    )
  schedule = SyncSchedule(
    sync_interval,
    num_fragments=1,
    overlap_steps=sync_interval if has_whole_delay else 0,
  )
  return dataclasses.replace(method, schedule=schedule)
