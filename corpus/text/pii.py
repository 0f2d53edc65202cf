"""Replace what identifies a person: mail addresses, public IP addresses, phone numbers.

| kind | found | replaced by |
|---|---|---|
| mail | `name@host.tld`; not `user@host` | email@example.com |
| ip | public IPv4 and IPv6 that stand alone; not private ones, versions | 192.0.2.1, 2001:db8::1 |
| phone | `+`, country code, 9 to 15 digits; North America: (212) 555-0123 | +1-555-0100 |

Names, postal addresses, and national numbers of other countries are not found.
"""

import ipaddress
import re
from collections import Counter

from corpus.text.verdicts import Change, Text, Verdict

_MAIL = re.compile(r"(?<![\w.+-])[\w.%+-]+@(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z]{2,}(?![\w-])")
_IP = re.compile(
    r"(?<![\w.:-])(?:(?:\d{1,3}\.){3}\d{1,3}(?![\w-]|\.\w)"
    r"|[23][0-9A-Fa-f]{3}(?::{1,2}[0-9A-Fa-f]{1,4}){1,7}(?:::)?(?![\w:-]|\.\w))",  # 2000::/3: the public ones
    re.ASCII,
)
_VERSION = re.compile(r"(?:\bv|version|release|build|\bver\.?|section|chapter|clause|§)\s*$", re.IGNORECASE)
_NORTH_AMERICA = r"(?:\([2-9]\d\d\) ?|[2-9]\d\d[ .-])[2-9]\d\d[ .-]\d{4}"
_PHONE = re.compile(
    rf"(?<![\w+./)-])(?:(?:\+?1[ .-])?{_NORTH_AMERICA}|\+1[2-9]\d{{9}}"
    r"|\+[2-9]\d{0,2}(?:[ .-]?\(0?\d{1,4}\)|[ .-]?\d{1,4}){2,5})(?![\w+-]|[.,/]\d)",
    re.ASCII,
)


def pii(text: Text) -> Verdict:
    """Replace mail addresses, public IP addresses and phone numbers."""
    counts: Counter[str] = Counter()

    def mail(_: re.Match[str]) -> str:
        counts["pii_mail"] += 1
        return "email@example.com"

    def ip(match: re.Match[str]) -> str:
        try:
            address = ipaddress.ip_address(match[0])
        except ValueError:
            return match[0]
        if not address.is_global or _VERSION.search(match.string[max(0, match.start() - 20) : match.start()]):
            return match[0]
        counts["pii_ip"] += 1
        return "192.0.2.1" if address.version == 4 else "2001:db8::1"  # of RFC 5737 and RFC 3849

    def phone(match: re.Match[str]) -> str:
        if not 9 <= sum(map(str.isdigit, match[0])) <= 15:
            return match[0]
        counts["pii_phone"] += 1
        return "+1-555-0100"  # reserved for fiction

    replaced = _PHONE.sub(phone, _IP.sub(ip, _MAIL.sub(mail, text) if "@" in text else text))
    return Change(replaced, counts) if counts else None
