"""What a launcher gives to a rank, and the port where ranks meet. Imports no torch: `Pair` is started before it is."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from prophet.doctor.check import Check, finding, sound

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_USUAL_PORT = 29500
_STANDALONE = "`torchrun --standalone`, or `unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT` for one process"
INTERFACE = (
    "`export GLOO_SOCKET_IFNAME=NAME` (and NCCL_SOCKET_IFNAME) with the interface between the ranks, `ip addr` lists "
    "them; their ports must be open to each other"
)


def launcher(environment: Mapping[str, str]) -> list[Check]:
    """Check that what a launcher writes into the environment is whole: all of it, or neither RANK nor WORLD_SIZE."""
    there = [name for name in _LAUNCHED if environment.get(name)]
    ranks = [name for name in _LAUNCHED[:2] if name in there]
    if not ranks:
        return [sound("launcher", "none: two ranks are started here")]
    # A job script that sets some of them by hand makes `init_process_group` wait for ranks that never come
    missing = [name for name in _LAUNCHED if name not in there]
    if missing:
        message = f"{', '.join(there)} {'is' if len(there) == 1 else 'are'} set, and not {', '.join(missing)}"
        return [finding("launcher", message, _STANDALONE)]
    wrong = [f"{n}={environment[n]}" for n in ("RANK", "WORLD_SIZE", "MASTER_PORT") if not environment[n].isdecimal()]
    if wrong:
        return [finding("launcher", f"expected whole numbers, got {', '.join(wrong)}", _STANDALONE)]
    if int(environment["RANK"]) >= int(environment["WORLD_SIZE"]):
        message = f"RANK={environment['RANK']} is none of WORLD_SIZE={environment['WORLD_SIZE']} ranks"
        return [finding("launcher", message, _STANDALONE)]
    at = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    return [sound("launcher", f"rank {environment['RANK']} of {environment['WORLD_SIZE']}, which meet at {at}")]


def port(environment: Mapping[str, str]) -> list[Check]:
    """Check that the port where ranks shall meet is free, only where this process would open it."""
    # torchrun's agent keeps the store open, so the port is rightly taken
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return [sound("port", f"{environment['MASTER_PORT']} is open, torchrun has opened it")]
    if environment.get("RANK", "0") != "0":
        return []
    value = environment.get("MASTER_PORT", "")
    number = int(value) if value.isdecimal() else _USUAL_PORT
    # As torch's store does: it listens on IPv6 and IPv4 together where the system can
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        socket.create_server(("", number), family=family, dualstack_ipv6=family == socket.AF_INET6).close()
    except (OSError, OverflowError) as error:
        whose = "MASTER_PORT" if value else "which torchrun takes unless told otherwise"
        message = f"{number}, {whose}, cannot be opened: {getattr(error, 'strerror', None) or error}"
        other = "`torchrun --standalone`, or another number with `--master-port` (MASTER_PORT)"
        return [finding("port", message, f"{other}; `ss -ltnp 'sport = :{number}'` names who has it")]
    return [sound("port", f"{number} is free")]
