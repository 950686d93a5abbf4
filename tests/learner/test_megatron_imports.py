"""A learner on a CPU starts without torch's compiler and wandb, and both are there where they are asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from streamrl.learner.megatron_imports import deferred

LOADS = """
import sys
import streamrl.learner.trainer
print("torch._inductor.compile_fx" in sys.modules, "wandb" in sys.modules)
import wandb
from megatron.core import jit
print(jit.jit_fuser(len)([1, 2]))
"""


def test_a_function_is_compiled_once_at_its_first_call_and_keeps_its_name():
    compiled = []

    def compile_function(function):
        compiled.append(function.__name__)
        return lambda *args: function(*args) + 1

    @deferred(compile_function)
    def double(number):
        """Twice the number."""
        return 2 * number

    assert (double.__name__, double.__doc__, compiled) == ("double", "Twice the number.", [])
    assert [double(1), double(2)] == [3, 5]
    assert compiled == ["double"]


@pytest.mark.slow
def test_a_trainer_is_loaded_without_them_and_they_come_when_they_are_asked_for():
    done = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True, timeout=200)
    assert done.stdout.split() == ["False", "False", "2"], done.stderr
