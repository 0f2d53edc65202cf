import os
from pathlib import Path

from common.files import fingerprint, first_change


def test_an_input_has_changed_if_its_content_has_whatever_its_time(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for path in files:
        path.write_text("as it was read")
    read = {str(path): fingerprint(path) for path in files}
    os.utime(files[0])
    assert first_change(read, files) is None, "touched"
    files[0].write_text("as it was ever")
    os.utime(files[0], (1, 1))
    assert first_change(read, files) == f"{files[0]}: changed since it was read", "of the same size, and older"
    assert first_change(read, files[1:]) == f"{files[0]}: missing since the inputs were read"
    assert first_change({}, files[1:]) == f"{files[1]}: new since the inputs were read"
