"""The critic's part of the configuration: where its model starts, its loss and its optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from streamrl.config.learner import OptimizerSettings
from streamrl.config.section import Section, rule

if TYPE_CHECKING:
    from streamrl.config.tree import Config


class CriticOptimizer(Section):
    """Adam of the critic; what is not here is as in `learner.optimizer`."""

    lr: float = Field(1e-5, gt=0, le=1, description="peak learning rate of the critic")
    min_lr: float = Field(0.0, ge=0, description="learning rate that the decay reaches behind the last step")
    warmup_steps: int = Field(0, ge=0, description="learner steps of linear warm-up of its learning rate")
    decay: Literal["constant", "linear", "cosine"] = Field("constant", description="shape of the decay over run.steps")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    clip_grad: float = Field(1.0, ge=0, description="largest gradient norm; 0: no clipping")

    def settings(self, policy: OptimizerSettings) -> OptimizerSettings:
        """All settings of the critic's optimizer: its own, and else those of the policy's."""
        return policy.model_copy(update=dict(self))

    @rule
    def _decays_downwards(self) -> None:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr: {self.min_lr:g} is above lr={self.lr:g}; allowed: up to lr")


class CriticConfig(Section):
    """The value model of `algo.advantage.estimator: gae`, on the learner's ranks and in its layout."""

    model: Path | None = Field(
        None, description="Hugging Face folder that the critic starts from, of the policy's tokenizer; null: model.path"
    )
    warmup_steps: int = Field(0, ge=0, description="first learner steps, which train the critic alone")
    value_clip: float | None = Field(
        0.5, gt=0, description="how far from that of the step's start a value still lowers the loss; null: any distance"
    )
    loss_weight: float = Field(1.0, gt=0, description="weight of the value loss")
    optimizer: CriticOptimizer = Field(default_factory=CriticOptimizer, description="Adam of the critic")


def critic_fits(config: Config) -> None:
    """Refuse what does not go together with a critic: ValueError with a line for each."""
    if not config.algo.advantage.has_critic:
        return
    refused = []
    if config.replay.filter.signal:
        refused.append(
            "replay.filter.signal: true drops groups with equal rewards, which algo.advantage.estimator=gae trains; "
            "allowed: false"
        )
    if config.trains_rows:
        refused.append(
            f"algo.advantage.estimator: gae has nothing to value in the rows of algo.loss={config.algo.loss}; "
            "allowed: group"
        )
    if refused:
        raise ValueError("\n".join(refused))
