"""Architectures of known recipes that no family builds, and what each would need."""

from __future__ import annotations

from collections.abc import Mapping

MISSING: Mapping[str, str] = {
    "MiniCPMO": "its tower and image processor are code of the folder, which is not run; images in slices; audio",
    "Glm4vForConditionalGeneration": "its tower, and multimodal positions in GLM-4's layers",
}
