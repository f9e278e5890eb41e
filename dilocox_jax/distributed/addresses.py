"""Addresses of processes: how they are read, looked up, and connected to."""

import socket
from typing import Any, NamedTuple


class Place(NamedTuple):
  """One address that a name of a host has.

  Attributes:
    family: Kind of the address, such as `socket.AF_INET`.
    address: Address as functions of sockets take it.
  """

  family: socket.AddressFamily
  address: Any


def split_address(address: str) -> tuple[str, int]:
  """Returns the host and the port of host:port.

  Raises:
    ValueError: One line, if the address has another form.
  """
  host, _, port = address.rpartition(":")
  if not host or not port.isdecimal() or int(port) > 65_535:
    raise ValueError(f"{address!r} is no address: give HOST:PORT")
  return host.strip("[]"), int(port)


def look_up(address: str) -> list[Place]:
  """Returns all places of host:port, the one to prefer first.

  Raises:
    ValueError: One line, if the address has another form.
    OSError: If the name is not known.
  """
  host, port = split_address(address)
  try:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
  except UnicodeError as error:  # The name has a part that no name may have.
    raise OSError(f"{host!r} is no name of a host") from error
  return [Place(family, place) for family, _, _, _, place in found]


def own_address(address: str) -> str:
  """Returns the address of this machine from which it reaches another one.

  Args:
    address: Address of the other machine, host:port.

  Raises:
    OSError: If no way leads there.
  """
  place = look_up(address)[0]
  with socket.socket(place.family, socket.SOCK_DGRAM) as probe:
    probe.connect(place.address)  # A datagram's socket sends nothing here.
    return probe.getsockname()[0]


def listen(address: str) -> socket.socket:
  """Returns a socket that listens at host:port as JAX's service does.

  Args:
    address: Address of this machine. The host `::` stands for all addresses,
      those of IPv4 among them.

  Raises:
    OSError: If this machine does not have the address, or the port is taken.
  """
  host, port = split_address(address)
  if host != "::":
    place = look_up(address)[0]
    return socket.create_server(place.address[:2], family=place.family)
  if not socket.has_dualstack_ipv6():
    return socket.create_server(("", port))
  return socket.create_server(
    ("", port), family=socket.AF_INET6, dualstack_ipv6=True
  )


def connect(places: list[Place], timeout_s: float) -> socket.socket:
  """Connects to the first of several places that answers.

  Args:
    places: The places.
    timeout_s: Seconds after which a place that does not answer is given up.

  Raises:
    OSError: If none answers.
  """
  failure = OSError("there is no address")
  for place in places:
    connection = socket.socket(place.family, socket.SOCK_STREAM)
    try:
      connection.bind(("", 0))
      # The system may choose the port that is called as the port to call from
      # while nobody listens there. The connection would lead back to itself,
      # and for a minute nobody could listen there.
      if connection.getsockname()[1] == place.address[1]:
        raise ConnectionRefusedError("the port to call is the port called from")
      connection.settimeout(timeout_s)
      connection.connect(place.address)
      return connection
    except OSError as error:
      connection.close()
      failure = error
  raise failure
