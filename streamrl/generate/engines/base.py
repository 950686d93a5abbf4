"""What an engine is: whatever gives tokens with their log-probs for token ids.

    task ─▶ Inference (generate/inference.py) ─▶ Policy ─▶ a server, an endpoint, a model in this process
                                                    └ an engine makes it

An engine is frozen unless it says otherwise: its weights are not the run's, so that it can be evaluated and can judge,
and cannot be trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from streamrl.choices import Choice, Options

if TYPE_CHECKING:
    from streamrl.config import Config
    from streamrl.generate.inference import EngineInference, Policy
    from streamrl.generate.judging import Ask


class Engine(Choice, ABC):
    """An engine with its options. The class says what others ask of it.

    Usage:
        async with engine.handles(config, scratch) as handles:
            await handles(greedy=True, deadline=None).generate("caf=", n=1)
    """

    trains: ClassVar[bool] = False  # whether a run's learner publishes to it; of built-in ones alone
    loads_weights: ClassVar[bool] = False  # whether it answers with those of `model.path`; False: with its own
    loads_adapters: ClassVar[bool] = False  # whether `learner.lora.adapter` may be on top of them

    def __init__(self, options: Options) -> None:
        """`options`: those of the key beside its name, of the class's own Options."""
        self.options = options

    @property
    def label(self) -> str:
        """What an evaluation of its own weights is called."""
        return type(self).__name__.lower()

    @abstractmethod
    def serving(self, config: Config, scratch: Path) -> AbstractAsyncContextManager[Policy]:
        """What answers, ready; closed behind the block. `scratch`: an empty folder.

        Every token is of version `generate.frozen.VERSION`. Raises EngineError, and ServerFailed for a server of its
        own.
        """

    @asynccontextmanager
    async def handles(self, config: Config, scratch: Path) -> AsyncIterator[partial[EngineInference]]:
        """Makes `Inference` handles: `handles(greedy=..., deadline=...)`. Tokenizer and sampling: those of `config`."""
        from streamrl.generate.inference import EngineInference, Load
        from streamrl.generate.tokenizer import Tokenizer

        tokenizer = Tokenizer.of(config)
        async with self.serving(config, scratch) as policy:
            yield partial(EngineInference, policy, tokenizer, config.generate, Load(), trained=False)

    def judge(self, config: Config, scratch: Path, *, greedy: bool) -> AbstractAsyncContextManager[Ask]:
        """Asks questions: `await ask("Is 2 + 2 = 4?", 1)` gives texts. Raises ScorerUnready."""
        from streamrl.generate.judging import judging

        return judging(self, config, scratch, greedy=greedy)
