"""Which run ids are possible on every store, and for which ids torch makes no log folder."""

from __future__ import annotations

import unicodedata

RESERVED = "!"
"""The first character of ids that are no runs: records that this package keeps; see `Archive`."""

# The longest id, percent-encoded, that Consul and DynamoDB take in a key.
_MOST_BYTES = 512

# torch makes a folder in its --log-dir: the id, "_" and eight characters. Linux takes 255 bytes.
_MOST_BYTES_OF_A_FOLDER = 255 - 9


def refuse_unless_possible(run_id: str) -> str:
    """The id, if a run can have it; raises `ValueError`, in one line."""
    if not run_id:
        raise ValueError("--rdzv-id is empty: give the run an id")
    shown = ascii(run_id if len(run_id) <= 40 else f"{run_id[:40]}...")
    if run_id.startswith(RESERVED):
        raise ValueError(
            f"--rdzv-id {shown}: ids that begin with '{RESERVED}' are reserved for what "
            "rdzv-plugins keeps beside the runs"
        )
    if any(unicodedata.category(it) in ("Cc", "Cs") for it in run_id):
        raise ValueError(
            f"--rdzv-id {shown}: control characters, and bytes that are no UTF-8, are not allowed"
        )
    if (size := len(run_id.encode())) > _MOST_BYTES:
        raise ValueError(f"--rdzv-id {shown}: {size} bytes, at most {_MOST_BYTES} are allowed")
    return run_id


def is_possible(run_id: str) -> bool:
    """Whether a run can have this id; another program may have written the list of runs."""
    try:
        return bool(refuse_unless_possible(run_id))
    except ValueError:
        return False


def why_no_log_folder(run_id: str) -> str | None:
    """Why torchrun cannot make its log folder for this id, as it does by default; None: it can."""
    size = len(run_id.encode())
    if "/" in run_id:
        why = "it has a '/'"
    elif size > _MOST_BYTES_OF_A_FOLDER:
        why = f"it has {size} bytes, more than {_MOST_BYTES_OF_A_FOLDER}"
    else:
        return None
    return f"torch names a folder of its --log-dir after the run id, which fails since {why}"
