"""Rules about the quality of English web text: Gopher's, C4's and FineWeb's.

- Gopher: Rae et al. 2021, "Scaling Language Models", table A1: quality and repetition.
- C4: Raffel et al. 2020, section 2.2; long words, cookies and terms of use as in its code.
- FineWeb: Penedo et al. 2024, section 3.5.

Those of C4, FineWeb and Gopher's repetition decide as datatrove's filters do: see docs/corpus.md.
"""

import re
from collections import Counter
from collections.abc import Sequence

from corpus.text.verdicts import Change, Text, Verdict, sentences

_STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
_BULLETS = ("•", "‣", "-", "*")
_ELLIPSES = ("...", "…")
_WORD = re.compile(r"\w+")
_PARAGRAPHS, _LINES = re.compile(r"\n{2,}"), re.compile(r"\n+")
_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_C4_ENDS = (".", "?", "!", '"', "'")
_POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
# Unicode's Sentence_Terminal, without scripts that are rare on the web
_FINEWEB_ENDS = tuple(".!?։؝؞؟۔܀܁܂߹।॥၊။።፧፨។៕‼‽⁇⁈⁉⸮。﹒﹖﹗！．？｡")


def gopher_words(text: Text) -> str | None:
    """Too few or too many words."""
    count = len(text.words)
    return None if 50 <= count <= 100_000 else f"{count} words"


def gopher_word_length(text: Text) -> str | None:
    """Words that are too short or too long on average."""
    mean = sum(map(len, text.words)) / max(len(text.words), 1)
    return None if 3 <= mean <= 10 else f"words of {mean:.1f} characters"


def gopher_symbols(text: Text) -> str | None:
    """Too many hash signs or ellipses per word."""
    count, words = max(text.count("#"), sum(map(text.count, _ELLIPSES))), len(text.words)
    return f"{count} # or … in {words} words" if count > 0.1 * words else None


def gopher_bullets(text: Text) -> str | None:
    """Too many lines that begin with a bullet."""
    count, lines = sum(line.startswith(_BULLETS) for line in text.lines), len(text.lines)
    return f"{count} of {lines} lines are bullets" if count > 0.9 * lines else None


def gopher_ellipsis(text: Text) -> str | None:
    """Too many lines that end with an ellipsis."""
    count, lines = sum(line.endswith(_ELLIPSES) for line in text.lines), len(text.lines)
    return f"{count} of {lines} lines end in …" if count > 0.3 * lines else None


def gopher_alphabetic(text: Text) -> str | None:
    """Too few words with a letter in them."""
    count, words = sum(any(map(str.isalpha, word)) for word in text.words), len(text.words)
    return f"{count} of {words} words have letters" if count < 0.8 * words else None


def gopher_stop_words(text: Text) -> str | None:
    """Too few of the stop words that every English text has."""
    count = len(_STOP_WORDS.intersection(_WORD.findall(text.lower())))
    return f"{count} of {len(_STOP_WORDS)} stop words" if count < 2 else None


def share_repeated(parts: Sequence[str]) -> tuple[int, int]:
    """The number of parts that repeat an earlier one, and their characters."""
    seen: set[str] = set()
    repeated = characters = 0
    for part in parts:
        if part in seen:
            repeated, characters = repeated + 1, characters + len(part)
        seen.add(part)
    return repeated, characters


def gopher_repetition(text: Text) -> Verdict:
    """Too many lines, paragraphs or n-grams that repeat in the document."""
    for name, parts in (("paragraphs", _PARAGRAPHS.split(text.strip())), ("lines", _LINES.split(text))):
        repeated, characters = share_repeated(parts)
        if repeated > 0.3 * len(parts):
            return f"{repeated} of {len(parts)} {name} repeat others"
        if characters > 0.2 * len(text):
            return f"{characters} of {len(text)} characters are in repeated {name}"
    for length, most in ((2, 0.2), (3, 0.18), (4, 0.16)):
        grams = Counter(map(" ".join, zip(*(text.tokens[start:] for start in range(length)), strict=False)))
        for gram, count in grams.most_common(1):
            if len(gram) * count > most * len(text):
                return f"{gram!r} {count} times"
    for length, most in ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10)):
        if (characters := _in_repeated_grams(text.tokens, length)) > most * len(text):
            return f"{characters} of {len(text)} characters are in repeated {length}-grams"
    return None


def _in_repeated_grams(words: Sequence[str], length: int) -> int:
    """The characters of n-grams that have occurred before, without overlaps."""
    seen: set[str] = set()
    characters = index = 0
    while index <= len(words) - length:
        gram = "".join(words[index : index + length])
        if gram in seen:
            characters, index = characters + len(gram), index + length
        else:
            seen.add(gram)
            index += 1
    return characters


def c4(text: Text) -> Verdict:
    """Cut lines that are no sentences; drop lorem ipsum, curly brackets, under five sentences."""
    kept: list[str] = []
    cut: Counter[str] = Counter()
    count = 0
    for line in map(str.strip, text.splitlines()):
        words = line.split()
        line = _CITATION.sub("", line)
        lower = line.lower()
        if any(len(word) > 1000 for word in words):
            cut["c4_long_word"] += 1
        elif not line.endswith(_C4_ENDS) or line.endswith("..."):
            cut["c4_no_end"] += 1
        elif len(words) < 3:
            cut["c4_few_words"] += 1
        elif "lorem ipsum" in lower:
            return "lorem ipsum"
        elif "javascript" in lower:
            cut["c4_javascript"] += 1
        elif "{" in line:
            return "a curly bracket"
        elif any(policy in lower for policy in _POLICIES):
            cut["c4_policy"] += 1
        else:
            count += sentences(line)
            kept.append(line)
    return f"{count} sentences" if count < 5 else Change("\n".join(kept).strip(), cut)


def fineweb(text: Text) -> Verdict:
    """Too few lines end a sentence; too many are short or repeated; too many lines per word."""
    lines = [line for line in text.split("\n") if line.strip()]
    ended, short = sum(line.endswith(_FINEWEB_ENDS) for line in lines), sum(len(line) <= 30 for line in lines)
    if ended < 0.12 * len(lines):
        return f"{ended} of {len(lines)} lines end a sentence"
    if short > 0.67 * len(lines):
        return f"{short} of {len(lines)} lines have 30 characters or fewer"
    characters = share_repeated(lines)[1]
    if characters > 0.01 * len(text.replace("\n", "")):
        return f"{characters} characters are in repeated lines"
    breaks = text.count("\n")
    return f"{breaks} line breaks to {len(text.tokens)} words" if breaks > 0.3 * len(text.tokens) else None


def digits(text: Text) -> Verdict:
    """More than 30 % digits."""
    count = sum(map(str.isdigit, text))
    return f"{count} of {len(text)} characters are digits" if count > 0.3 * len(text) else None
