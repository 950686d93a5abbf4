"""Which model modules of the installed SGLang a server leaves out."""

import ast
import json
import shutil

import pytest

from streamrl.engine.model_modules import of_sglang, unneeded


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"]}))
    return tmp_path


def test_all_but_the_module_with_the_models_class_are_left_out(model):
    names = {file.stem for file in of_sglang().glob("*.py")}
    assert len(names) > 100
    assert names - set(unneeded([], model, of_sglang())) == {"qwen2"}


def test_where_another_class_may_be_asked_for_nothing_is_left_out(model, tmp_path):
    assert unneeded(["--speculative-algorithm", "EAGLE"], model, of_sglang()) == ()
    assert unneeded(["--model-impl=transformers"], model, of_sglang()) == ()
    ngram = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"]
    assert unneeded(ngram, model, of_sglang()) == unneeded([], model, of_sglang()) != ()
    for override in ('{"architectures": ["Other"]}', '{"quantization_config": {}, "model_type": "a"}', "[]", "no JSON"):
        assert unneeded(["--json-model-override-args", override], model, of_sglang()) == ()
    assert unneeded([], tmp_path / "absent", of_sglang()) == ()
    (model / "config.json").write_text(json.dumps({"architectures": ["NobodyKnowsForCausalLM"]}))
    assert unneeded([], model, of_sglang()) == ()
    for content in ("{}", "[]", '{"architectures": null}', "no JSON"):
        (model / "config.json").write_text(content)
        assert unneeded([], model, of_sglang()) == ()


def test_another_format_of_the_weights_asks_for_no_other_class(model):
    arguments = ["--port", "1", "--json-model-override-args", '{"quantization_config": {"quant_method": "fp8"}}']
    assert unneeded(arguments, model, of_sglang()) == unneeded([], model, of_sglang()) != ()


@pytest.mark.slow
def test_no_class_that_sglang_registers_is_left_out_for_a_model_of_it(tmp_path):
    registered = 0
    (tmp_path / "another.py").touch()
    for file in of_sglang().glob("*.py"):
        tree = ast.parse(file.read_text())
        entries = [node.value for node in tree.body if isinstance(node, ast.Assign) and is_entry(node.targets[0])]
        for name in {each.id for entry in entries for each in ast.walk(entry) if isinstance(each, ast.Name)}:
            (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
            shutil.copy(file, tmp_path / "one.py")
            assert unneeded([], tmp_path, tmp_path) == ("another",), file
            registered += 1
    assert registered > 100


def is_entry(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id == "EntryClass"
