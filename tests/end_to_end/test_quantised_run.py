"""The whole loop with servers in FP8 by blocks, which compute on this machine as the stand-in does."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from launch import tiny_model
from streamrl import cli
from streamrl.observe.metrics import read_metrics


@pytest.fixture
def blocks(tmp_path):
    """A model whose key heads and MLP are whole blocks."""
    folder = tmp_path / "blocks"
    tokenizer = tiny_model.make_tokenizer(8)
    config = AutoConfig.for_model(
        "qwen2", vocab_size=len(tokenizer), hidden_size=128, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=False,
        initializer_range=tiny_model.INITIALIZER_RANGE, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id, bos_token_id=None, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["broadcast", "delta"])
def test_a_run_with_quantised_servers_measures_their_gap_and_keeps_every_promise(make_run, blocks, capsys, transport):
    run = make_run(steps=6).start(
        f"model.path={blocks}", "model.dtype=bfloat16", "generate.quantization=fp8", f"publish.transport={transport}"
    )
    code, output = run.finish()
    assert code == 0, output
    rows = list(read_metrics(run.folder))
    assert len(rows) == 6
    # The first step trains what its own weights have drawn: what is left is the gap of the servers' numbers.
    assert 0.01 < rows[0]["offpolicy/log_ratio_mean"] < 0.15
    assert cli.main(["audit", str(run.folder)]) == 0, capsys.readouterr().out
    assert "log-prob difference to Hugging Face, fp8:" in capsys.readouterr().out
