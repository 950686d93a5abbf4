"""`python -m tests.megatron_rl_files CHECKOUT`: what streamrl makes of the environment files of Megatron-LM.

One line for each entry; the exit code is 1 where a file is refused.
"""

from __future__ import annotations

import sys
from pathlib import Path

from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.tasks.registry import check_arguments

FOLDER = Path("examples/rl/environment_configs")


def main(checkout: Path) -> int:
    """Load each file as `task.file`."""
    refused = 0
    files = sorted((checkout / FOLDER).glob("*.yaml"))
    for file in files:
        try:
            task = config_file.load(None, [f"task.file={file}"]).task
            for share in task.mix:
                check_arguments(share)
        except ConfigError as error:
            refused += 1
            print(f"{file.name}: {error}")
            continue
        for share in task.mix:
            use = "evaluated" if share.evaluation_only else f"weight {share.weight:g}"
            print(f"{file.name}: {share.key}: {share.name} {share.args}, {use}")
    print(f"{len(files)} files, {refused} refused")
    return int(refused > 0 or not files)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
