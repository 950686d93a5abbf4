"""`streamrl sft CONFIG`: rows are checked and tokenised into the run folder, then its learner trains them.

configuration ──checks──▶ claim ──▶ rows: those that the run folder has, or tokenised ──▶ run folder ──▶ learner
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamrl import preflight, run_folder
from streamrl.config import Config, senseless
from streamrl.config.file import ConfigError
from streamrl.config.refused import Refusals
from streamrl.config.sft import ALGO
from streamrl.generate.tokenizer import Tokenizer
from streamrl.hub.model import with_local_model
from streamrl.learner.shape import ModelShape
from streamrl.learner.token_rows import HELD_OUT, ROWS, TRAINED, TokenRows
from streamrl.model_dtype import with_dtype
from streamrl.places import absolute
from streamrl.preflight.machine import check_learner_alone, rounding
from streamrl.preflight.prompts import tokenizer_of, unread_variables
from streamrl.preflight.tokenizer import check_tokenizer
from streamrl.sft.rows import limit_of, tokenise
from streamrl.sft.supervisor import RowsSupervisor


def main(config: Config, given: Path, *, fresh: bool = False) -> int:
    """Train to the end, or resume. `given`: the file of `config`. Returns the exit code, as `streamrl train` does.

    Raises ConfigError before anything of the run is written.
    """
    if config.sft.data.path is None:
        raise ConfigError("sft.data.path: null has no rows; allowed: a file of rows, or a data set's hub name")
    if config.run.epochs is not None:
        raise ConfigError(f"run.epochs: {config.run.epochs:g} is of a task's prompts; allowed: null, with sft.epochs")
    config = supervised(with_dtype(absolute(with_local_model(config)), fresh=fresh))
    shape, tokenizer = _checked(config)
    limit = limit_of(config, shape)
    recorded = config.run_folder / ROWS
    going_on = recorded.exists() and not fresh
    if going_on:
        config = _with_steps(config, TokenRows(recorded / TRAINED))
    if going_on or config.sft.epochs is None:  # how many steps the others have, their rows say: `make` checks them
        run_folder.check(config, fresh=fresh)
    claim = run_folder.lock(config)
    try:
        with _rows(config, tokenizer, limit, recorded if going_on else None) as (rows, lines):
            config = _with_steps(config, TokenRows(rows / TRAINED))
            folder = run_folder.make(config, fresh=fresh)
            if rows != recorded:
                rows.rename(folder / ROWS)
        senseless.warn([*senseless.warnings(config), *rounding(config), *unread_variables(tokenizer), *lines])
        return RowsSupervisor(config, folder, given).run()
    finally:
        os.close(claim)


def supervised(config: Config) -> Config:
    """The same configuration with what trains rows, whatever it says of answers: the loss, one update a step."""
    learner = config.learner.model_copy(update={"passes": 1, "mini_batches": 1, "router_replay": False})
    run = config.run.model_copy(update={"placement": "separate"})
    return config.model_copy(update={"algo": ALGO, "learner": learner, "run": run})


def _checked(config: Config) -> tuple[ModelShape, Tokenizer]:
    """What the machine, the model and its tokenizer say. Raises ConfigError, with a line for each mistake."""
    refusals = Refusals()
    with refusals:
        check_learner_alone(config)
    with refusals:
        shape = preflight.check_layout(config)
        tokenizer = tokenizer_of(config.model.path, variables=config.task.chat_template_kwargs)
        check_tokenizer(config.model.path, tokenizer, shape)
    refusals.tell()
    return shape, tokenizer


@contextmanager
def _rows(config: Config, tokenizer: Tokenizer, limit: int, recorded: Path | None) -> Iterator[tuple[Path, list[str]]]:
    """The folder of the rows, and what is told of them: that of the run, or one beside it, to be moved there."""
    if recorded is not None:
        splits = [TRAINED, HELD_OUT] if config.sft.evaluate_every else [TRAINED]
        longest = max(TokenRows(recorded / split).longest for split in splits if (recorded / split).exists())
        budget = config.learner.tokens_per_micro_batch
        if longest > budget:
            raise ConfigError(
                f"learner.tokens_per_micro_batch: {budget} cannot hold the run's longest row, of {longest} tokens; "
                f"allowed: at least {longest}"
            )
        yield recorded, []
        return
    with tempfile.TemporaryDirectory(prefix=f".{config.run.name}.", dir=config.run.folder) as folder:
        rows = Path(folder) / ROWS
        try:
            lines = tokenise(config, tokenizer, limit, rows)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"run.folder: {folder}: {reason}; allowed: a folder with room for the rows") from None
        yield rows, lines


def _with_steps(config: Config, rows: TokenRows) -> Config:
    """With the steps of `sft.epochs`; the last one is filled up with rows of a further epoch."""
    if config.sft.epochs is None:
        return config
    steps = -(-config.sft.epochs * len(rows) // config.sft.batch)
    return config.model_copy(update={"run": config.run.model_copy(update={"steps": steps})})
