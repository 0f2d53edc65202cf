import argparse

import pytest

from benchmarks.tokenize import add_options, measure


def test_every_encoder_and_the_parts_of_our_step_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.tokenize._alone", lambda cores, function, *arguments: function(*arguments))
    parser = argparse.ArgumentParser()
    add_options(parser)
    result = measure(parser.parse_args(["--count", "20"]))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.splitlines() if "|" in line]
    rates = {row[0]: row for row in lines if len(row) == 5}
    assert len(rates) == 2 + 6  # two header lines
    assert rates["tokenizers, encode"][4] == rates["tiktoken, encode_to_numpy"][3] == "1.00"
    parts = {row[0]: row for row in lines if len(row) == 3 and row[2].endswith("%")}
    assert 95 <= sum(int(row[2].rstrip("%")) for row in parts.values()) <= 105
    assert {"read and decompress", "encode", "write"} <= parts.keys()
