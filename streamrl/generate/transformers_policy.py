"""A model in this process, as `Policy` (generate/inference.py): Hugging Face's `generate`, one request at a time.

torch and transformers are imported where they are used: all else of a worker goes without them.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from streamrl.engine.answers import Answer
from streamrl.engine.client import SentImage
from streamrl.generate.frozen import Ends, EngineRefused, Parameters, check_request, typed_answer
from streamrl.generate.tokenizer import Tokenizer
from streamrl.mamba_steps import without_floor
from streamrl.types import PolicyVersion

if TYPE_CHECKING:
    import torch

NAME = "transformers"


class _Until(NamedTuple):
    """What ends a request before its length and its end tokens do."""

    ended: threading.Event  # from outside
    ends: Ends | None


class TransformersPolicy:
    """The model of a folder. `close` it.

    Usage:
        policy = TransformersPolicy(Path("models/tiny"), dtype="float32")
        answers = await policy.generate([5, 6, 7], {"temperature": 1.0, "max_new_tokens": 4}, n=8)
    """

    def __init__(self, model: Path, *, dtype: str, device: str = "cpu") -> None:
        """Load the weights. `dtype`: torch's name. Raises EngineRefused for a folder that transformers cannot load."""
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils import logging

        logging.disable_progress_bar()  # a bar of a thread that ends with its process may hold the lock of all bars
        if device == "cuda" and not torch.cuda.is_available():
            raise EngineRefused(NAME, "device: cuda is not there; allowed: cpu")
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                model, dtype=getattr(torch, dtype), trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError, ImportError) as error:
            raise EngineRefused(NAME, f"{model} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
        self._model = without_floor(loaded.to(device)).eval()
        self._model.generation_config = GenerationConfig()  # a folder's own would draw in another way than is asked for
        self._tokenizer = Tokenizer(model)
        self._running: dict[str, _Until] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=NAME)

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: dict[str, Any],
        n: int,
        request_id: str | None = None,
        *,
        routed_experts: bool = False,
        kept_sets: bool = False,
        ends: Ends | None = None,
        priority: int = 0,
        images: Sequence[SentImage] = (),
        at_least: PolicyVersion | None = None,
    ) -> list[Answer]:
        """`n` answers. `sampling`: SGLang's names; the log-probs are those at its temperature, before truncation.

        top_k comes before top_p, and top_p before min_p, each of what the former left. The same `seed` draws the same
        answers on the same machine. Requests wait for each other, in their order whatever their priority. Raises
        EngineRefused for what it cannot do.
        """
        check_request(NAME, experts=routed_experts, sets=kept_sets, images=images, at_least=at_least)
        asked = Parameters.of(sampling, NAME)
        if not input_ids:
            raise EngineRefused(NAME, "a prompt without tokens; allowed: at least one")
        name = request_id or uuid.uuid4().hex
        until = self._running[name] = _Until(threading.Event(), ends)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._answers, name, list(input_ids), asked, n, until)
        finally:
            until.ended.set()  # cancelled, it ends with its next token
            self._running.pop(name, None)

    async def abort(self, request_id: str = "") -> None:
        """End one request, or all, with its next token."""
        for name, until in list(self._running.items()):
            if request_id in ("", name):
                until.ended.set()

    def close(self) -> None:
        """End what is running and wait for it."""
        for until in list(self._running.values()):
            until.ended.set()
        self._thread.shutdown(wait=True)

    def _answers(self, name: str, ids: list[int], asked: Parameters, n: int, until: _Until) -> list[Answer]:
        import torch
        from transformers import GenerationConfig

        if until.ended.is_set():
            return [typed_answer(NAME, f"{name}-{row}", [], [], "abort") for row in range(n)]
        prompt = torch.tensor([ids] * n, device=self._model.device)
        draw = _Draw(asked)
        watch = _Watch(asked, n, draw, prompt=len(ids), text=self._tokenizer.text, until=until)
        # Temperature and truncation are applied by _Draw; given here, they would be applied twice.
        settings = GenerationConfig(
            do_sample=not asked.greedy,
            max_new_tokens=asked.max_new_tokens,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
        )
        with torch.inference_mode(), self._seeded(asked.seed):
            drawn = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=settings,
                logits_processor=[draw],
                stopping_criteria=[watch],
            )[:, len(ids) :].tolist()
        logprobs = torch.stack(watch.logprobs, 1).tolist()
        return [
            typed_answer(NAME, f"{name}-{row}", drawn[row][:length], logprobs[row][:length], finish)
            for row, (length, finish) in enumerate(watch.endings())
        ]

    @contextmanager
    def _seeded(self, seed: int | None) -> Iterator[None]:
        """Draw with this seed, and leave torch's generators as they were."""
        import torch

        if seed is None:
            yield
            return
        device = self._model.device
        with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield


class _Draw:
    """A logits processor: divides by the temperature, keeps the log-probs [n, V] of that, and truncates."""

    def __init__(self, asked: Parameters) -> None:
        from transformers.generation import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        self._temperature = asked.temperature or 1.0
        self._truncations: list[Any] = []
        if asked.greedy:
            return
        if asked.top_k != -1:
            self._truncations.append(TopKLogitsWarper(asked.top_k))
        if asked.top_p < 1.0:
            self._truncations.append(TopPLogitsWarper(asked.top_p))
        if asked.min_p > 0.0:
            self._truncations.append(MinPLogitsWarper(asked.min_p))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.float() / self._temperature
        self.logprobs = scores.log_softmax(-1)
        for truncation in self._truncations:
            scores = truncation(input_ids, scores)
        return scores


class _Watch:
    """A stopping criterion: which rows have ended, with how many tokens and why; and each token's log-prob.

    `prompt`: its tokens, which come before those that are drawn.
    """

    def __init__(
        self,
        asked: Parameters,
        n: int,
        draw: _Draw,
        *,
        prompt: int,
        text: Callable[[Sequence[Sequence[int]]], list[str]],
        until: _Until,
    ) -> None:
        self.logprobs: list[torch.Tensor] = []  # T x [n]
        self._asked = asked
        self._prompt = prompt
        self._draw = draw
        self._text = text
        self._until = until
        self._lengths: list[int | None] = [None] * n  # of the rows that have come to their end

    def __call__(self, input_ids: torch.Tensor, scores: Any, **others: Any) -> torch.Tensor:
        last = input_ids[:, -1]
        self.logprobs.append(self._draw.logprobs.gather(1, last[:, None])[:, 0])
        for row, token in enumerate(last.tolist()):
            if self._lengths[row] is None and self._ends(input_ids[row], token):
                self._lengths[row] = len(self.logprobs)
        stops = [length is not None or self._until.ended.is_set() for length in self._lengths]
        return input_ids.new_tensor(stops).bool()

    def endings(self) -> list[tuple[int, Literal["stop", "length", "abort"]]]:
        """Tokens of each row, and why it has no more."""
        drawn = len(self.logprobs)
        cut: Literal["length", "abort"] = "length" if drawn >= self._asked.max_new_tokens else "abort"
        return [(drawn, cut) if length is None else (length, "stop") for length in self._lengths]

    def _ends(self, ids: torch.Tensor, token: int) -> bool:
        if token in self._asked.stop_token_ids:
            return True
        drawn = ids[self._prompt :].tolist()
        if self._until.ends is not None and self._until.ends.found(drawn, len(drawn) - 1):
            return True
        if not self._asked.stop:
            return False
        (text,) = self._text([drawn])
        return any(stop in text for stop in self._asked.stop)
