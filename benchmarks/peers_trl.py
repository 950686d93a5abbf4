"""One run of TRL's GRPOTrainer, as `benchmarks/peers.py` asks for it: the only file that the other environment runs.

    PYTHONPATH=. python benchmarks/peers_trl.py JOB.json

JOB.json is a `Job`. `prompts` has a JSON line {"prompt": chat messages, "answer": text} each, `output` gets one a step:

    {"step", "time": end of the step, "generation": seconds of sampling and scoring, "tokens", "reward"}

The prompts are asked in the order of the file. The reward is 1 where the last number of an answer is the right one.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.tasks.answers import last_number  # pure text: needs nothing that is not in both environments


@dataclass(frozen=True, slots=True)
class Job:
    """A run, in words that both sides have."""

    model: str  # Hugging Face folder
    prompts: str
    output: str
    folder: str  # where TRL may write
    steps: int
    seed: int
    group_size: int  # samples of a prompt
    groups_per_step: int
    max_new_tokens: int
    temperature: float
    lr: float
    beta1: float
    beta2: float
    adam_eps: float
    weight_decay: float
    clip_grad: float
    eps_low: float
    eps_high: float
    bf16: bool  # passes in bfloat16 over weights in float32; else everything in float32
    target: float | None  # mean reward of `over` steps at which the run ends, after `least` steps at the earliest
    over: int
    least: int


def steps_to_reward(rewards: Sequence[float], target: float | None, over: int) -> int | None:
    """Steps until the mean reward of the last `over` of them is `target`; None where it never is, or there is none."""
    if target is None:
        return None
    ends = range(over, len(rewards) + 1)
    return next((end for end in ends if statistics.fmean(rewards[end - over : end]) >= target), None)


def is_over(rewards: Sequence[float], target: float | None, over: int, least: int) -> bool:
    """Whether a run of so many steps is long enough, and at the reward."""
    return len(rewards) >= least and steps_to_reward(rewards, target, over) is not None


def right(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float | None]:
    """TRL's form of a reward: one number a completion, which is a list of chat messages."""
    said = [last_number(messages[-1]["content"]) for messages in completions]
    return [float(number == gold) for number, gold in zip(said, answer, strict=True)]


def train(job: Job) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = [json.loads(line) for line in Path(job.prompts).read_text().splitlines()]
    batch = job.group_size * job.groups_per_step
    rewards: list[float] = []

    class Timed(GRPOTrainer):
        """Keeps what a step was made of."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began = time.perf_counter()
            made = super()._generate_and_score_completions(inputs)
            self.generation = time.perf_counter() - began
            self.tokens = int(made["completion_mask"].sum())
            return made

    class Writer(TrainerCallback):
        """A line a step. TRL logs the step's metrics behind its end."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ended = time.time()

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            logs = kwargs["logs"]
            if "reward" not in logs:
                return
            row = {
                "step": state.global_step,
                "time": self.ended,
                "generation": trainer.generation,
                "tokens": trainer.tokens,
                "reward": logs["reward"],
            }
            with Path(job.output).open("a") as file:
                file.write(json.dumps(row) + "\n")
            rewards.append(logs["reward"])
            control.should_training_stop |= is_over(rewards, job.target, job.over, job.least)

    arguments = GRPOConfig(
        output_dir=job.folder,
        max_steps=job.steps,
        seed=job.seed,
        per_device_train_batch_size=batch,
        num_generations=job.group_size,
        max_completion_length=job.max_new_tokens,
        temperature=job.temperature,
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        adam_beta1=job.beta1,
        adam_beta2=job.beta2,
        adam_epsilon=job.adam_eps,
        weight_decay=job.weight_decay,
        max_grad_norm=job.clip_grad,
        epsilon=job.eps_low,
        epsilon_high=job.eps_high,
        loss_type="dapo",  # the mean over the step's tokens
        beta=0.0,
        bf16=job.bf16,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        use_cpu=True,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Timed(
        model=job.model,
        reward_funcs=right,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Writer()],
    )
    trainer.train()


if __name__ == "__main__":
    train(Job(**json.loads(Path(sys.argv[1]).read_text())))
