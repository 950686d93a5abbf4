"""`streamrl trace RUN`: the run as a trace for Perfetto, or a line for every second of it."""

from __future__ import annotations

from pathlib import Path

from streamrl.config.file import ConfigError
from streamrl.lab.output import check_file
from streamrl.observe import trace
from streamrl.observe.events import event_files

FORMATS = (".json", ".csv")


def main(run_folder: Path, output: Path | None = None) -> int:
    """Write the run's trace to `output` (default: RUN/trace.json), by its ending.

    `.json`: Chrome's trace format. `.csv`: for every second what each role did and who held the run up. A file that
    is there is replaced. Raises ConfigError for another ending, and for a run that has recorded nothing.
    """
    output = output or run_folder / "trace.json"
    check_file("--output", output, FORMATS)
    if not event_files(run_folder):
        raise ConfigError(f"{run_folder}: no event logs in events/; allowed: a run that has begun")
    if output.suffix == ".csv":
        print(f"{output}: {trace.write_seconds(run_folder, output)} seconds")
    else:
        count = trace.write(run_folder, output)
        print(f"{output}: {count} events; open it at https://ui.perfetto.dev or chrome://tracing")
    return 0
