"""The sequence classifier itself: texts to token ids as transformers makes them, and token ids to scores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from streamrl.config.refused import ConfigError
from streamrl.config.reward_model import RewardModelConfig
from streamrl.device import detect
from streamrl.reward_model.folder import ALLOWED, label_of, read_description
from streamrl.reward_model.wire import Ask


class Classifier:
    """A model of `AutoModelForSequenceClassification`.

    Usage:
        classifier = Classifier(RewardModelConfig(path=folder))
        classifier.scores(classifier.ids(Ask(text="1+1=", answers=["2", "3"])))
    """

    def __init__(self, settings: RewardModelConfig) -> None:
        """Load the folder. Raises ConfigError with one line for one that cannot be loaded, or is not whole."""
        assert settings.path is not None
        folder = Path(os.path.abspath(settings.path))
        self._label = label_of(read_description(folder), folder, settings.label)
        self._chat = settings.chat_template
        try:
            self._load(folder, settings)
        except ConfigError:
            raise
        except Exception as error:  # transformers, safetensors and torch raise all kinds
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ConfigError(f"reward_model.path: {folder} cannot be loaded ({reason}); allowed: {ALLOWED}") from error
        text = self._model.config.get_text_config()
        self._pad: int | None = text.pad_token_id
        positions = getattr(text, "max_position_embeddings", None) or 1 << 62
        self.longest = min(settings.tokens_per_batch, positions - self._first_position())

    def _load(self, folder: Path, settings: RewardModelConfig) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        on_gpu = settings.gpus > 0 and detect().kind == "cuda"
        spread = {"device_map": "auto"} if on_gpu and settings.gpus > 1 else {}
        self._model, found = AutoModelForSequenceClassification.from_pretrained(
            folder,
            dtype=getattr(torch, settings.dtype),
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **spread,
        )
        if missing := sorted(found["missing_keys"]):  # transformers would draw them at random
            raise ConfigError(f"reward_model.path: {folder} lacks {missing[0]}; allowed: {ALLOWED}")
        self._model.eval()
        if on_gpu and not spread:
            self._model.to("cuda")

    def _first_position(self) -> int:
        """The number of a sequence's first position: RoBERTa and its kin begin behind that of padding."""
        for name, module in self._model.named_modules():
            if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
                return int(module.padding_idx) + 1
        return 0

    @property
    def most(self) -> int | None:
        """Answers of one batch; None: as many as its tokens allow. A model without a pad token takes one by one."""
        return 1 if self._pad is None else None

    def ids(self, ask: Ask) -> list[list[int]]:
        """The token ids of each answer behind its prompt. Raises ValueError where the chat template refuses them."""
        texts = [self._text(ask, answer) for answer in ask.answers]
        return [list(ids) for ids in self._tokenizer(texts, add_special_tokens=not self._chat)["input_ids"]]

    @torch.inference_mode()
    def scores(self, batch: Sequence[Sequence[int]]) -> list[float]:
        """For each sequence the logit of the label, as the model gives it alone: padded on the right, and masked.

        Raises MemoryError where the accelerator has no room for the batch.
        """
        longest, device = max(map(len, batch)), next(self._model.parameters()).device
        ids = torch.full((len(batch), longest), 0 if self._pad is None else self._pad)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(batch):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = 1
        try:
            logits = self._model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise MemoryError(str(error)) from None
        found: list[float] = logits[:, self._label].float().cpu().tolist()
        return found

    def _text(self, ask: Ask, answer: str) -> str:
        if not self._chat:
            prompt = ask.text if ask.messages is None else "\n".join(each.content for each in ask.messages)
            return f"{prompt}{answer}"
        turns = [{"role": each.role, "content": each.content} for each in ask.messages or ()]
        turns = turns or [{"role": "user", "content": ask.text or ""}]
        turns.append({"role": "assistant", "content": answer})
        try:
            return str(self._tokenizer.apply_chat_template(turns, tokenize=False))
        except Exception as error:  # jinja2's, of a template that refuses the messages
            raise ValueError(f"chat template of the reward model: {error}") from error
