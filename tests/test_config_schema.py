"""The schema of a configuration: it accepts what streamrl accepts, and every written file names one that is there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from streamrl import cli
from streamrl.choices import KINDS
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config import schema as config_schema

ROOT = Path(__file__).parents[1]
COMMITTED = ROOT / "configs" / config_schema.NAME
FILES = sorted(file for file in ROOT.glob("configs/**/*.yaml") if file.parent.name != "experiments")  # those are sweeps


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(config_schema.schema())
    return jsonschema.Draft202012Validator(config_schema.schema())


def tree(text: str) -> Any:
    return config_file.parse_yaml(text, where="text")


def test_every_shipped_configuration_fits_it(validator: jsonschema.Draft202012Validator) -> None:
    assert len(FILES) > 30
    wrong = {file: list(validator.iter_errors(tree(file.read_text()))) for file in FILES}
    assert {file: errors for file, errors in wrong.items() if errors} == {}


def test_every_default_fits_it_and_every_key_is_described(validator: jsonschema.Draft202012Validator) -> None:
    assert list(validator.iter_errors(tree(config_file.as_yaml(config_file.as_tree(Config()))))) == []
    for section in (config_schema.schema(), *config_schema.schema()["$defs"].values()):
        assert section["additionalProperties"] is False
        assert all(key["description"] for key in section["properties"].values())


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("replay: {order: fifo}", True),
        ("replay: {order: 'mine.py:Newest'}", True),
        ("replay: {order: my.orders:Newest}", True),
        ("replay: {order: newest}", False),
        ("model: {family: null}", True),
        ("replay: {order: null}", False),
        ("replay: {max_stalenes: 1}", False),
        ("bananas: 1", False),
        ("observe: {wandb: off}", True),
        ("observe: {wandb: sometimes}", False),
        ("run: {steps: 0}", False),
        ("learner: {optimizer: {lr: 1e-6}}", True),
        ("generate: {attach: ['http://a:1']}", True),
        ("generate: {attach: [a]}", False),
        ("base: [a.yaml, b.yaml]", True),
    ],
)
def test_it_knows_choices_ranges_and_unknown_keys(
    text: str, fits: bool, validator: jsonschema.Draft202012Validator
) -> None:
    assert validator.is_valid(tree(text)) == fits


def test_the_names_of_every_kind_of_choice_are_in_it() -> None:
    written = config_schema.text()
    in_the_tree = [kind for kind in KINDS if kind.key != "task.args.tools"]
    assert [kind.key for kind in in_the_tree if not all(f'"{name}"' in written for name in kind.names)] == []


def test_the_one_in_configs_is_current_and_every_file_there_names_it() -> None:
    assert COMMITTED.read_text() == config_schema.text(), "streamrl schema -o configs/config.schema.json"
    for file in FILES:
        named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", file.read_text())
        assert named is not None, file
        assert (file.parent / named[1]).resolve() == COMMITTED


def test_a_saved_configuration_names_the_schema_beside_it(tmp_path: Path) -> None:
    for _ in range(2):
        config_file.save(Config(), tmp_path / "config.yaml")
        first = (tmp_path / "config.yaml").read_text().partition("\n")[0]
        assert (tmp_path / first.rpartition("=")[2]).read_text() == config_schema.text()
        (tmp_path / config_schema.NAME).write_text("{}")  # of an older version
    assert config_file.load(tmp_path / "config.yaml") == Config()


def test_the_command_prints_it_or_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == config_schema.schema()
    assert cli.main(["schema", "-o", str(tmp_path / "s.json")]) == 0
    assert (tmp_path / "s.json").read_text() == printed
    assert cli.main(["schema", "-o", str(tmp_path / "nowhere" / "s.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
