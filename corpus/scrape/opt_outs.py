"""Opt-outs of a page and its site: robots directives, and the TDM Reservation Protocol.

    check_headers(page, settings)                          X-Robots-Tag and tdm-reservation
    not parse_tdmrep(body).allows("/books/1")              /.well-known/tdmrep.json
    meta_opt_out(html, settings, reserved_by="tdmrep")     <meta>, which overrides both for TDM

Robots directives have no standard; as in Google's documentation, all that apply to this robot add
up. For TDM, <meta> supersedes the header, and the header the file (W3C community group's final
report of TDMRep, "Processing priority"); of two values in one place, the one that reserves counts.
"""

import re
from collections.abc import Iterable
from dataclasses import replace

import orjson
import turbohtml

from common.errors import PageError
from common.settings import ScrapeSettings
from corpus.scrape.response import FetchedPage
from corpus.scrape.robots import PathRules

TDMREP_PATH = "/.well-known/tdmrep.json"
ROBOTS_REASONS = frozenset({"x_robots_tag", "meta_robots"})
TDM_REASONS = frozenset({"tdm_header", "tdm_meta", "tdmrep", "tdmrep_unreachable"})
_MAX_BYTES = 500 * 1024  # of a tdmrep.json, as of a robots.txt
_VALUED = frozenset({"unavailable_after", "max-snippet", "max-image-preview", "max-video-preview"})
_ROBOT = re.compile(r"(?=.*[a-z])([\w.-]+)(?:/\S*)?|\*")  # the hour of a date is no robot
_WORD = re.compile(r"[a-z][a-z_-]*")


def _opts_out(value: str, settings: ScrapeSettings) -> bool:
    """Whether one of a list of directives counts and applies to this robot.

    A robot's name before a colon applies to the directives after it, up to the next name.
    """
    counting = {*settings.opt_out_directives, *(["none"] if "noindex" in settings.opt_out_directives else [])}
    mine = {"*", "robots", settings.robot_token.lower()}
    applies = True
    for part in re.split("[,;]", value.lower()):
        name, colon, words = (piece.strip() for piece in part.partition(":"))
        if colon and name not in _VALUED and name not in counting:
            if not _ROBOT.fullmatch(name):
                continue  # the end of a date
            applies = name.partition("/")[0] in mine
        else:
            words = name
        if applies and counting.intersection(_WORD.findall(words)):
            return True
    return False


def _reserved(values: Iterable[object]) -> bool | None:
    """Whether values of tdm-reservation in one place reserve TDM; None if none is 0 or 1."""
    parts = {part.strip() for value in values for part in str(value).split(",")}
    return "1" in parts or (False if "0" in parts else None)


def check_headers(page: FetchedPage, settings: ScrapeSettings) -> FetchedPage:
    """Set `reserved_by` from the page's headers. Raises PageError (`x_robots_tag`)."""
    headers = [(name.lower(), value) for name, value in page.headers]
    if any(name == "x-robots-tag" and _opts_out(value, settings) for name, value in headers):
        raise PageError("x_robots_tag")
    reserved = _reserved(value for name, value in headers if name == "tdm-reservation")
    return page if reserved is None else replace(page, reserved_by="tdm_header" if reserved else "")


def parse_tdmrep(body: bytes) -> PathRules:
    """The rules of a tdmrep.json: the first location that matches counts. No rules if malformed."""
    try:
        content = orjson.loads(body.removeprefix(b"\xef\xbb\xbf")) if len(body) <= _MAX_BYTES else None
    except orjson.JSONDecodeError:
        content = None
    locations: list[tuple[str, bool]] = []
    for rule in content if isinstance(content, list) else []:
        if isinstance(rule, dict) and isinstance(location := rule.get("location"), str) and location.strip():
            reserved = _reserved([rule.get("tdm-reservation")])
            if reserved is not None:
                locations.append((location.strip(), not reserved))
    return PathRules(locations)


def meta_opt_out(html: str, settings: ScrapeSettings, reserved_by: str) -> str:
    """The reason to drop a page by its <meta> elements, wherever they are; else `reserved_by`."""
    reservations = []
    for meta in turbohtml.parse(html, positions=False).find_all("meta"):
        given = {key: str(value or "") for key, value in meta.attrs.items()}
        name, content = given.get("name", "").strip().lower(), given.get("content", "")
        is_header = given.get("http-equiv", "").strip().lower() == "x-robots-tag"
        if (is_header or name in ("robots", settings.robot_token.lower())) and _opts_out(content, settings):
            return "meta_robots"
        if name == "tdm-reservation":
            reservations.append(content)
    reserved = _reserved(reservations)
    return reserved_by if reserved is None else "tdm_meta" if reserved else ""
