from corpus.extract.charset import decode

RUSSIAN = "Каждый охотник желает знать, где сидит фазан."
HTML = "text/html"
EVIDENCE = [
    (f"<script>{'x' * 5000}</script><meta charset=' koi8-r'>", HTML, "koi8_r"),
    ("", f'{HTML};Charset="koi8-r"; x=1', "koi8_r"),
    ("<meta charset=no-such-thing><meta charset=koi8-r>", HTML, "koi8_r"),
    ("<meta charset=windows-1252>", f"{HTML}; charset=koi8-r", "koi8_r"),
    ("<?xml version='1.0' encoding='windows-1252'?><meta charset=koi8-r>", HTML, "koi8_r"),
    ("<?xml version='1.0' encoding='koi8-r'?><meta charset=windows-1252>", "application/xhtml+xml", "koi8_r"),
    ("<meta charset=windows-1252>", "text/plain", "koi8_r"),  # no <meta> in plain text: detected
    ("<meta charset=utf-16>", HTML, "utf-8"),
    ("<meta charset=koi8-r>", f"{HTML}; charset=koi8-r", "utf-8-sig"),
    ("", f"{HTML}; charset=utf-8", "utf-16-le"),
    *(("", HTML, codec) for codec in ("cp1251", "koi8_r", "cp866")),  # undeclared: detected
]


def test_the_stronger_evidence_wins() -> None:
    for start, content_type, codec in EVIDENCE:
        text = f"{start}<p>{RUSSIAN}</p>"
        assert decode(text.encode(codec), content_type) == text, (start, content_type, codec)


def test_a_declaration_that_the_bytes_contradict_is_not_believed() -> None:
    # valid UTF-8 of four characters wins over a declaration, and so do ten with one error
    assert decode("é".encode() * 3, f"{HTML}; charset=gbk") == "茅茅茅"
    assert decode("é".encode() * 4, f"{HTML}; charset=gbk") == "éééé"
    assert decode("é".encode() * 9 + b"\xff.", f"{HTML}; charset=iso-8859-1") == "Ã©" * 9 + "ÿ."
    assert decode("é".encode() * 10 + b"\xff.", f"{HTML}; charset=iso-8859-1") == "é" * 10 + "\ufffd."
    # of another encoding, a twentieth may be errors
    controls = "\x81\x8d\x8f\x90\x9d"
    assert decode(controls.encode("latin-1") + b"\xe9" * 95, f"{HTML}; charset=iso-8859-1") == controls + "é" * 95
    czech = "Příliš žluťoučký kůň úpěl ďábelské ódy, šťastně žil a žije. " * 3
    assert decode(czech.encode("cp1250"), f"{HTML}; charset=iso-8859-2", "https://one.cz/") == czech
    assert decode("ąž".encode("cp1257"), HTML, "https://one.lt/a") == "ąž"  # the top-level domain is a hint
    for declared in ("", "; charset=utf-8", "; charset=no-such-thing"):
        text = "<p>A café’s “menu” – naïve, isn’t it?"
        assert decode(text.encode("cp1252"), HTML + declared) == text
    assert decode("été".encode() + b"\xff!", f"{HTML}; charset=utf-8") == "été\ufffd!"
