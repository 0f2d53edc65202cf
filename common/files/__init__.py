"""File input and output of every step: compressed text, JSON-lines shards, all-or-nothing writes.

A shard is `*.jsonl.zst` with one document per line: `{"id", "url", "text", …}`. Writers make a regular file appear
complete or not at all; readers name the file and the line that they cannot read.
"""

from common.files.documents import (
    LONGEST_LINE,
    MARK,
    BadLines,
    Document,
    read_documents,
    read_json_lines,
    read_object,
    read_shards,
    require_kept,
    short_hash,
    unmarked_blocks,
)
from common.files.fingerprints import Fingerprint, fingerprint, first_change, sha256
from common.files.formats import foreign
from common.files.inputs import Kind, expand_inputs, find_inputs, require_regular
from common.files.outputs import check_outputs, exists, is_stdout, locate
from common.files.reading import is_readable, read_blocks, read_json, read_lines, read_rows, read_text
from common.files.shards import (
    MAX_SHARDS,
    document_writer,
    optional_writer,
    reject_writer,
    require_distinct_stems,
    shard_name,
    shard_paths,
    shard_stem,
    sharded_writer,
)
from common.files.writing import (
    Output,
    atomic_path,
    atomic_paths,
    beside,
    fsync,
    naming,
    open_locked,
    output_files,
    scratch_file,
    write_json,
    write_text,
)

__all__ = [
    "LONGEST_LINE",
    "MARK",
    "MAX_SHARDS",
    "BadLines",
    "Document",
    "Fingerprint",
    "Kind",
    "Output",
    "atomic_path",
    "atomic_paths",
    "beside",
    "check_outputs",
    "document_writer",
    "exists",
    "expand_inputs",
    "find_inputs",
    "fingerprint",
    "first_change",
    "foreign",
    "fsync",
    "is_readable",
    "is_stdout",
    "locate",
    "naming",
    "open_locked",
    "optional_writer",
    "output_files",
    "read_blocks",
    "read_documents",
    "read_json",
    "read_json_lines",
    "read_lines",
    "read_object",
    "read_rows",
    "read_shards",
    "read_text",
    "reject_writer",
    "require_distinct_stems",
    "require_kept",
    "require_regular",
    "scratch_file",
    "sha256",
    "shard_name",
    "shard_paths",
    "shard_stem",
    "sharded_writer",
    "short_hash",
    "unmarked_blocks",
    "write_json",
    "write_text",
]
