"""How sections of a config say what is wrong with a field."""


def require(condition: bool, message: str) -> None:
  """Raises ValueError with a message unless a condition holds."""
  if not condition:
    raise ValueError(message)


def positive(section: str, **values: int | float) -> None:
  """Raises ValueError for the first value of a section that is not above 0."""
  for name, value in values.items():
    require(value > 0, f"{section}.{name}={value} must be positive")


def within(
  low: int, high: float | int, section: str, **values: float | int
) -> None:
  """Raises ValueError for the first value outside a range, or not a number."""
  for name, value in values.items():
    require(
      low <= value <= high,
      f"{section}.{name}={value} must be from {low:g} to {high:g}",
    )


def one_of(name: str, value: str, choices) -> None:
  """Raises ValueError, with the choices, unless a value is one of them."""
  if value not in choices:
    raise ValueError(f"{name}={value!r} must be one of {', '.join(choices)}")
