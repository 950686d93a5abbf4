"""The whole loop with drafts that servers look up, which are verified on this machine as the stand-in does."""

import pytest

from streamrl import cli
from streamrl.observe.metrics import read_metrics


@pytest.mark.slow
@pytest.mark.parametrize("interruption", ["retract", "abort"])
def test_a_run_with_drafts_keeps_every_promise_and_tells_how_many_tokens_a_pass_gives(make_run, capsys, interruption):
    run = make_run(steps=8).start(
        "generate.speculation={algorithm: ngram, draft_tokens: 6}", f"publish.interruption={interruption}",
        "generate.sampling={max_new_tokens: 24, temperature: 0.8}", "generate.stream_every=5",
        "generate.heartbeat=0.1",
    )  # fmt: skip
    code, output = run.finish()
    assert code == 0, output
    rows = list(read_metrics(run.folder))
    assert len(rows) == 8
    lengths = [row["speculation/accept_length"] for row in rows if "speculation/accept_length" in row]
    assert len(lengths) >= 2  # steps between two heartbeats have none
    assert all(1 <= length <= 6 for length in lengths)
    assert max(lengths) > 1
    assert cli.main(["audit", str(run.folder)]) == 0, capsys.readouterr().out
