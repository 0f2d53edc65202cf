"""File input and output of every step: compressed text, JSON-lines shards, all-or-nothing writes.

A shard is `*.jsonl.zst` with one document per line: `{"id", "url", "text", …}`. Files appear
complete or not at all; readers name the file and the line that they cannot read.
"""

from common.files.documents import (
    LONGEST_LINE,
    MARK,
    REMOVED_IDS,
    BadLines,
    Document,
    lines_at,
    located_documents,
    read_documents,
    read_json_lines,
    read_object,
    read_shards,
    removed_ids,
    short_hash,
)
from common.files.inputs import (
    Fingerprint,
    Kind,
    digest,
    expand_inputs,
    find_inputs,
    fingerprint,
    first_change,
    is_left_out,
    require_regular,
    sha256,
    train_split,
)
from common.files.kinds import is_binary, is_torn, kind_of
from common.files.reading import (
    COMPRESSED,
    Frames,
    is_readable,
    read_blocks,
    read_cells,
    read_head,
    read_json,
    read_lines,
    read_rows,
    read_text,
)
from common.files.shards import (
    MAX_SHARDS,
    document_writer,
    line_writer,
    require_distinct_stems,
    shard_name,
    shard_paths,
    shard_stem,
    sharded_lines,
    sharded_writer,
)
from common.files.writing import (
    atomic_path,
    cache_path,
    check_outputs,
    fsync,
    lock,
    locked_run,
    naming,
    open_locked,
    output_files,
    scratch_file,
    target_of,
    write_json,
    write_text,
)
