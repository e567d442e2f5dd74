"""Where ``regista.load`` was first looked for; the code is in ``loading``."""

from __future__ import annotations

from regista.backbones.loading import load as load
