"""A document of a schema of ours, read back from JSON."""

from __future__ import annotations

import gzip
import json
import pathlib
import zlib
from typing import Any

from fsdp_doctor.errors import UsageError


def read_document(path: pathlib.Path, kind: str, schema: str, newest: int) -> dict[str, Any]:
    """Of any version of the schema up to the newest. kind: what it is called.

    Raises UsageError for anything else.
    """
    try:
        data = read_json(path)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise UsageError(f"cannot read the {kind} {path}: {reason or error}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not a {kind} of fsdp-doctor: it is not JSON ({error})") from None
    if not isinstance(data, dict) or data.get("schema") != schema:
        raise UsageError(f"{path} is not a {kind} of fsdp-doctor: its 'schema' is not {schema!r}")
    version = data.get("schema_version")
    if type(version) is not int or not 1 <= version <= newest:
        raise UsageError(f"{path} has schema version {version}, this fsdp-doctor reads up to {newest}: upgrade it")
    return data


def read_json(path: pathlib.Path) -> Any:
    """A name that ends in .gz is gzip's. Raises OSError, EOFError, zlib.error, ValueError or RecursionError."""
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
