"""The endpoint of a real run, while it goes on. Where its time goes is looked at in test_run.py, in a finished one."""

from __future__ import annotations

import socket
import urllib.request

import pytest


@pytest.mark.slow
def test_the_endpoint_of_a_run_serves_while_it_goes_on_and_closes_with_it(make_run):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    run = make_run(steps=40).start(f"observe.prometheus_port={port}")
    run.wait_for(lambda: run.steps() >= 4)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    for words in (
        "streamrl_reward_mean ",
        'streamrl_phase_seconds_total{phase="forward",role="learner-0"}',
        'streamrl_roofline_tokens_per_s{of="now"}',
        'streamrl_held_up_share{by="learner"}',
    ):
        assert words in text
    code, output = run.finish()
    assert code == 0, output
    assert "Where the time went" in output
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60)
