"""Digests under versioned specifications: what each covers is fixed, and pinned by test vectors.

xxh3 finds accidents; sha256 gives integrity. Neither is a signature: who can write the snapshot can write its digests.
"""

from run_snapshot.digests.data import DataSource, Rows, RowsDigest, digest_rows, explain_rows, read_source
from run_snapshot.digests.files import FileDigest, digest_file
from run_snapshot.digests.spec import FILE_SPEC, ROWS_SPEC, WEIGHTS_SPEC
from run_snapshot.digests.weights import (
    TensorDigest,
    WeightsTree,
    compare_weights,
    digest_state,
    digest_weights_file,
)

__all__ = [
    "FILE_SPEC",
    "ROWS_SPEC",
    "WEIGHTS_SPEC",
    "DataSource",
    "FileDigest",
    "Rows",
    "RowsDigest",
    "TensorDigest",
    "WeightsTree",
    "compare_weights",
    "digest_file",
    "digest_rows",
    "digest_state",
    "digest_weights_file",
    "explain_rows",
    "read_source",
]
