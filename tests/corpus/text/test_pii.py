import pytest

from corpus.text.pii import pii
from corpus.text.verdicts import Change, Text

MAIL, IP, IP6, PHONE = "email@example.com", "192.0.2.1", "2001:db8::1", "+1-555-0100"
FOUND = [
    ("Write to jane.doe@mail.example.org.", f"Write to {MAIL}."),
    ("<j+news@a-b.co.uk>, JOHN_1@X.IO", f"<{MAIL}>, {MAIL}"),
    ("mailto:me%you@site.museum?subject=x", f"mailto:{MAIL}?subject=x"),
    ("Connect to 8.8.8.8 or 93.184.216.34:443.", f"Connect to {IP} or {IP}:443."),
    ("from 1.1.1.1, and [9.9.9.9]", f"from {IP}, and [{IP}]"),
    ("2606:4700:4700::1111 answers", f"{IP6} answers"),
    ("2a00:1450:4001:0810:0000:0000:0000:200e and 2606:4700::", f"{IP6} and {IP6}"),
    ("Call (212) 555-0123 now", f"Call {PHONE} now"),
    ("212-555-0123, 212.555.0123, 212 555 0123", f"{PHONE}, {PHONE}, {PHONE}"),
    ("1-800-555-0199 or +1 (800) 555 0199", f"{PHONE} or {PHONE}"),
    ("+12125550123;", f"{PHONE};"),
    ("+44 20 7946 0958", PHONE),
    ("Tel.: +49 (0)30 1234567", f"Tel.: {PHONE}"),
    ("+33 1 23 45 67 89.", f"{PHONE}."),
    ("+4915123456789", PHONE),
    ("+86-138-0013-8000", PHONE),
]
KEPT = """
user@host | @handle | a @ b.com | x@y. | price@2.50 | @media.screen | 10.0.0.1 | 192.168.1.20 | 127.0.0.1
169.254.1.1 | 0.0.0.0 | 256.1.1.1 | 300.400.500.600 | version 4.2.1.3 | v1.2.3.4 | section 1.2.3.4
Chrome/51.0.2704.103 | 1.2.3.4.5 | 1.2.3 | release 8.8.8.8 | release 8.8.8.8 | fe80::1 | ::1 | 00:11:22:33:44:55
00:11:22:33:44:55:66:77 | 12:30:45 | std::vector | 2024-11-23 | 23/11/2024 | 1999-2003 | ISBN 978-3-16-148410-0
3.14159265358979 | 12,345,678.90 | $1 200 300 | +10 200 300 | f(x)+10 200 300 | x = y +12 34 56 78 90
a+49 30 1234567 | +5 | 1 + 2125550123 | 555-0123 | 0xDEADBEEF | 4111 1111 1111 1111 | 123-45-6789 | 2125550123
112-555-0123 | #212-555-01234 | DE89 3704 0044
"""


@pytest.mark.parametrize(("text", "replaced"), FOUND)
def test_what_identifies_a_person_is_replaced_and_counted(text: str, replaced: str) -> None:
    found = pii(Text(text))
    assert isinstance(found, Change) and found.text == replaced
    places = {"pii_mail": (MAIL,), "pii_ip": (IP, IP6), "pii_phone": (PHONE,)}
    counts = {kind: sum(map(replaced.count, values)) for kind, values in places.items()}
    assert found.counts == {kind: count for kind, count in counts.items() if count}


@pytest.mark.parametrize("text", KEPT.strip().replace("\n", " | ").split(" | "))
def test_near_misses_are_kept(text: str) -> None:
    assert pii(Text(f"It is {text} today")) is None
