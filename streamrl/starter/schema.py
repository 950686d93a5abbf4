"""`streamrl schema`: the JSON schema of a configuration."""

from __future__ import annotations

from pathlib import Path

from streamrl.config.refused import ConfigError
from streamrl.config.schema import text


def main(output: Path | None) -> int:
    """Print it, or write it to a file. Returns 0. Raises ConfigError for a file that cannot be written."""
    if output is None:
        print(text(), end="")
        return 0
    try:
        output.write_text(text())
    except OSError as error:
        raise ConfigError(f"--output: {output}: {error.strerror}; allowed: a file that can be written") from None
    return 0
