"""Functions for network addresses of processes, written as HOST:PORT."""

import socket
from typing import Any, NamedTuple


class Endpoint(NamedTuple):
  """A socket address with its address family.

  Attributes:
    family: Address family, such as `socket.AF_INET`.
    address: Address in the form that sockets of this family use, such as
      ("10.0.0.1", 8476).
  """

  family: socket.AddressFamily
  address: Any


def split_address(address: str) -> tuple[str, int]:
  """Splits an address such as "node1:8476" or "[::1]:8476" into host and port.

  Raises:
    ValueError: If the address is not HOST:PORT.
  """
  host, _, port = address.rpartition(":")
  if not host or not port.isdecimal() or int(port) > 65_535:
    raise ValueError(f"{address!r} is no address: give HOST:PORT")
  return host.strip("[]"), int(port)


def look_up(address: str) -> list[Endpoint]:
  """Returns the socket addresses of HOST:PORT, the preferred one first.

  Raises:
    ValueError: If the address is not HOST:PORT.
    OSError: If the name of the host is not known.
  """
  host, port = split_address(address)
  try:
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
  except UnicodeError as error:  # The name is not a valid name of a host.
    raise OSError(f"{host!r} is no name of a host") from error
  return [
    Endpoint(family, socket_address)
    for family, _, _, _, socket_address in entries
  ]


def own_address(address: str) -> str:
  """Returns the address from which this machine would call another machine.

  Nothing is sent to the other machine.

  Args:
    address: Address of the other machine, such as "node1:8476".

  Returns:
    The address without a port, such as "10.0.0.2".

  Raises:
    ValueError: If the address is not HOST:PORT.
    OSError: If the other machine's name is unknown, or there is no route to it.
  """
  endpoint = look_up(address)[0]
  with socket.socket(endpoint.family, socket.SOCK_DGRAM) as probe:
    probe.connect(endpoint.address)  # A datagram socket sends nothing here.
    return probe.getsockname()[0]


def listen(address: str) -> socket.socket:
  """Returns a socket that listens at an address of this machine.

  Args:
    address: Address such as "node1:8476". In "[::]:8476" the host means all
      addresses, including those of IPv4.

  Raises:
    ValueError: If the address is not HOST:PORT.
    OSError: If the name of the host is not known, if this machine does not have
      the address, or if the port is taken.
  """
  host, port = split_address(address)
  if host != "::":
    endpoint = look_up(address)[0]
    return socket.create_server(endpoint.address[:2], family=endpoint.family)
  if not socket.has_dualstack_ipv6():
    return socket.create_server(("", port))
  return socket.create_server(
    ("", port), family=socket.AF_INET6, dualstack_ipv6=True
  )


def connect(endpoints: list[Endpoint], timeout_s: float) -> socket.socket:
  """Returns a connection to the first of several socket addresses that answers.

  Args:
    endpoints: Socket addresses, which are tried in this order.
    timeout_s: Seconds to wait for an answer of each address. The returned
      socket keeps this timeout.

  Raises:
    OSError: If no address answers.
  """
  failure = OSError("there is no address")
  for endpoint in endpoints:
    connection = socket.socket(endpoint.family, socket.SOCK_STREAM)
    try:
      connection.bind(("", 0))
      # The system chooses the source port. While nobody listens at the target
      # port, it may choose the target port. The socket would then connect to
      # itself, and for a minute nobody could listen at the port.
      if connection.getsockname()[1] == endpoint.address[1]:
        raise ConnectionRefusedError("the port to call is the port called from")
      connection.settimeout(timeout_s)
      connection.connect(endpoint.address)
      return connection
    except OSError as error:
      connection.close()
      failure = error
  raise failure
