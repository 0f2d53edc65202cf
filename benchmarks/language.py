"""The language rule of corpus.clean on manual pages, whose language is the name of their folder.

They are a hard case: many are half translated, and all have English options and names.
"""

import hashlib
import re
import subprocess
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Row
from common.errors import InputError
from corpus.text.language import language_of

_MIN_CHARACTERS = 512  # as corpus.clean


def measure(arguments: Namespace) -> Iterator[Row]:
    """Languages of manual pages: precision and recall by the folder of each page."""
    paths = [path for folder in arguments.texts or () for path in folder.rglob("man/**/man[1-8]/*.gz")]
    if not paths:
        raise InputError("name the folders of unpacked packages such as manpages-de with --texts")
    by_language = defaultdict(list)
    for path in paths:
        folder = path.parent.parent.name
        by_language["en" if folder == "man" else folder[:2]].append(path)
    pairs = Counter[tuple[str, str]]()
    for language, own in sorted(by_language.items()):
        own.sort(key=lambda path: hashlib.sha256("/".join(path.parts[-3:]).encode()).digest())
        texts = (text for path in own if len(text := _text(path)) >= _MIN_CHARACTERS)
        pairs.update((language, language_of(text).code) for text, _ in zip(texts, range(arguments.count), strict=False))
    for language in sorted(by_language):
        pages, right = sum(n for (folder, _), n in pairs.items() if folder == language), pairs[language, language]
        called = sum(n for (_, code), n in pairs.items() if code == language)
        others = [f"{code} {n}" for (folder, code), n in sorted(pairs.items()) if folder == language != code]
        yield {
            "folder": language,
            "pages": pages,
            "recall": right / pages,
            "precision": right / called if called else None,
            "taken for": ", ".join(others) or "-",
        }


def _text(path: Path) -> str:
    """A page as `man` prints it, without overstrike; empty for a mere reference to another page."""
    command = ["man", "--encoding=UTF-8", "--no-justification", "--local-file", str(path)]
    printed = subprocess.run(
        command, capture_output=True, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}, check=False
    )
    return re.sub(".\b", "", printed.stdout.decode("utf-8", "replace"))
