"""robots.txt: what a site allows, by RFC 9309, read with Protego."""

import re
from collections.abc import Awaitable, Callable

from protego import Protego
from yarl import URL

from corpus.network import PageError
from corpus.urls import Url, parse_url

_BYTES = 500 * 1024  # RFC 9309, section 2.5
_REDIRECTS = 5  # RFC 9309, section 2.3.1.2
_BUSY = frozenset({"http_429", "timeout", "too_large"})  # and http_5xx: it cannot say now what it allows
_AGENT = re.compile(r"\s*user[-\s]*agent\s*:?\s*([^#]*)", re.IGNORECASE)


async def fetch_robots(origin: URL, robot: str, ask: Callable[[Url], Awaitable[bytes | str]]) -> Protego | str:
    """The rules of an origin: everything is allowed where it has none (4xx), nothing where it cannot say.

    `ask` answers with a body or with the URL of a redirect, or raises PageError. The answer is a string, the reason,
    when nothing may be fetched; the reasons of an origin that is out of reach are those of its pages.
    """
    location = f"{origin}/robots.txt"
    for hop in range(_REDIRECTS + 1):
        try:
            answer = await ask(parse_url(location))
        except ValueError:
            break  # a redirect to nowhere
        except PageError as error:
            if error.reason.startswith("http_5") or error.reason in _BUSY:
                return "robots_unreachable"
            if error.reason.startswith("http_") or error.reason in ("bad_encoding", "redirect_refused"):
                break
            if not hop:
                return error.reason
            if error.reason in ("private_host", "no_contact"):
                break  # as good as nowhere
            return "robots_unreachable"
        if isinstance(answer, bytes):
            return parse_robots(answer, robot)
        location = answer
    return Protego.parse("")


def parse_robots(body: bytes, robot: str) -> Protego:
    """The rules in a robots.txt, those for other robots than `robot` lumped together.

    Protego keeps a group's rules once for each of its agents: 500 KiB of 20,000 agents and 20,000 rules would hold
    up everything for minutes.
    """
    lines = body[:_BYTES].decode("utf-8", "replace").splitlines()
    return Protego.parse("\n".join(_rename(line, robot.lower()) for line in lines))


def _rename(line: str, robot: str) -> str:
    """The line, with another robot's name replaced by one for all of them."""
    if (agent := _AGENT.match(line)) is None:
        return line
    name = agent[1].strip().lower()
    if name != "*":
        name = name.replace("*", "")
        name = name if name and robot.startswith(name) else "(another)"
    return f"user-agent: {name}"
