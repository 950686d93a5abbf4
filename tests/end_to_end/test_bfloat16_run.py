"""A run in bfloat16: its audit is held to its own rounding, and finds stamps that are off by one step."""

from itertools import pairwise

import pytest

from streamrl import cli
from streamrl.types import PolicyVersion


@pytest.mark.slow
def test_the_audit_of_a_run_in_bfloat16_passes_its_stamps_and_finds_shifted_ones(make_run, capsys):
    longer = ("generate.group_size=8", "generate.sampling.max_new_tokens=16")
    run = make_run(steps=12).start("model.dtype=bfloat16", *longer)
    code, output = run.finish()
    assert code == 0, output
    code = cli.main(["audit", str(run.folder)])
    told = capsys.readouterr().out
    print(told)
    assert code == 0
    assert "times what bfloat16 alone changes in Hugging Face" in told

    weights = run.folder / "weights"  # each version's place is taken by the one behind it
    versions = sorted(map(PolicyVersion.parse, (folder.name for folder in weights.iterdir())))
    (weights / str(versions[0])).rename(run.folder / "first")
    for before, behind in pairwise(versions):
        (weights / str(behind)).rename(weights / str(before))
    code = cli.main(["audit", str(run.folder)])
    told = capsys.readouterr().out
    print(told)
    assert code == 1
    assert "another version drew them" in told
