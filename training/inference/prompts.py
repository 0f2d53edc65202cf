"""Read a file of prompts. Imports no torch."""

from pathlib import Path

import orjson

from common.errors import InputError
from common.files import Document, read_lines


def read_prompts(path: Path) -> list[Document]:
    """The prompts in a file as `{"prompt": text}`: one object per line of a .jsonl file, or any other file's lines.

    Raises InputError if the file is empty or a line is not a prompt.
    """
    records = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            record = orjson.loads(line) if ".jsonl" in path.suffixes else {"prompt": line.decode()}
        except ValueError as error:  # malformed JSON or UTF-8
            raise InputError(f"{path}:{number}: {error}") from None
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
            raise InputError(f"{path}:{number}: not a JSON object with a string under 'prompt'")
        records.append(record)
    if not records:
        raise InputError(f"{path}: no prompts; write one per line")
    return records
