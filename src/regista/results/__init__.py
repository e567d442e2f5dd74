"""What a run leaves behind: a versioned record as JSON, arrays as safetensors; no torch needed."""

from __future__ import annotations

from regista.results.folder import RunFolder
from regista.results.provenance import weights_hash
from regista.results.record import SCHEMA_VERSION, RunRecord

__all__ = ["SCHEMA_VERSION", "RunFolder", "RunRecord", "weights_hash"]
