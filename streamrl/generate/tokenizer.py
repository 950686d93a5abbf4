"""The model folder's tokenizer and chat template, without torch.

`transformers` would do the same and import torch into every worker: four seconds, and 400 MB of memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import numpy as np
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from streamrl.config import Config
from streamrl.generate.prompt_images import PromptImages
from streamrl.tasks.environment import Message
from streamrl.tasks.parsing import Parsers

# Prompts whose ids are remembered: the same prompt comes back with every epoch of a small task, and with every single
# request of a group; beyond it the oldest is forgotten.
CACHE = 1024


# Replaces an answer where a chat template is rendered around it: without spaces at its ends, or any sign that a
# template looks for.
MARK = "~~answer of the policy~~"


# What a template writes that takes every content for text, and is given an image.
IMAGE_AS_IT_IS = "{'type': 'image'"

# Tokens at which SGLang ends answers whatever the model says, where a server has a tokenizer.
ADDED_ENDS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")


class Tokenizer:
    """Text and conversations to token ids, and back."""

    @classmethod
    def of(cls, config: Config) -> Tokenizer:
        """The tokenizer of a run. Raises as `Tokenizer` does."""
        task = config.task
        images = PromptImages.of(config.model.path, task.max_image_bytes)
        return cls(config.model.path, task.chat_template_kwargs, keeps_marks=Parsers.of(task).marks, images=images)

    def __init__(
        self,
        model: Path,
        variables: Mapping[str, Any] | None = None,
        *,
        keeps_marks: bool = False,
        images: PromptImages | None = None,
    ) -> None:
        """Read `tokenizer.json` and, where there, the chat template and end tokens. Raises OSError, ValueError.

        variables: further ones of the chat template. keeps_marks: does a parser need the special tokens of answers?
        images: those of the prompts, for callers that ask; they are no part of what is tokenised here.
        """
        self.images = images
        self.keeps_marks = keeps_marks
        self._variables = dict(variables or {})
        self._tokenizer = FastTokenizer.from_file(str(model / "tokenizer.json"))
        self._tokenizer.no_truncation()  # of whoever saved it; transformers, too, takes neither from the file
        self._tokenizer.no_padding()
        self._settings = _read_json(model / "tokenizer_config.json")
        self._template = self._compile(model)
        self._cache: dict[str, np.ndarray] = {}
        self.end_ids = self._end_ids(model)  # any of them ends an answer

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token, special ones among them, and its id."""
        return dict(self._tokenizer.get_vocab())

    @property
    def special(self) -> dict[str, int]:
        """The special tokens, which no text has, and their ids."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: place for place, token in added.items() if token.special}

    @property
    def largest_id(self) -> int:
        """The largest id of a token that a text can have: special ones are left out."""
        special = {place for place, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        return max(set(self._tokenizer.get_vocab().values()) - special, default=-1)

    @property
    def end_id(self) -> int:
        """What ends a text: the tokenizer's `eos_token`, else the first of `end_ids`, which must have one."""
        own = self._tokenizer.token_to_id(self._special_tokens().get("eos_token", ""))
        return self.end_ids[0] if own is None else own

    def prompt_ids(self, prompt: str | Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> np.ndarray:
        """int32 [P]. Text is tokenised as it is; a conversation by the chat template, up to where the answer begins.

        tools: functions that the policy may call, as OpenAI describes them, for the template. Raises ValueError for a
        conversation where the model has no chat template, or the template refuses it or does not tell of the tools.
        """
        text = self.rendered(prompt, tools)
        if tools and not isinstance(prompt, str) and text == self._render(prompt):
            raise ValueError("chat template: it does not tell of tools; tell the policy of them in a message")
        key = f"{isinstance(prompt, str):d}{text}"
        if key not in self._cache:
            if len(self._cache) >= CACHE:
                del self._cache[next(iter(self._cache))]
            # A template writes its special tokens itself; plain text gets those of the model (a BOS).
            encoding = self._tokenizer.encode(text, add_special_tokens=isinstance(prompt, str))
            self._cache[key] = np.array(encoding.ids, np.int32)
        return self._cache[key]

    def rendered(self, prompt: str | Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
        """The text that `prompt_ids` tokenises. Raises ValueError as it does."""
        return prompt if isinstance(prompt, str) else self._render(prompt, tools)

    def plain_ids(self, text: str) -> np.ndarray:
        """int32 [A]: text as it is, without special tokens of the model's own."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def added_ids(
        self,
        history: Sequence[Message],
        added: Sequence[Message],
        last: int | None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> np.ndarray:
        """int32 [A]: what the chat template writes behind an answer to `history`, up to where the next one begins.

        The difference of two renderings, tokenised on its own: a mark replaces the answer, whose own tokens are
        never rendered, tokenised or looked at again. An end token that the template writes is left out where the
        answer's `last` token is the same one. Raises ValueError where the template refuses the messages.
        """
        rendered = self._render([*history, Message(role="assistant", content=MARK), *added], tools)
        _, mark, behind = rendered.partition(MARK)
        if not mark or MARK in behind:
            raise ValueError("chat template: it does not write an assistant's message once, as it is")
        ids = self.plain_ids(behind)
        return ids[1:] if len(ids) and last in self.end_ids and ids[0] == last else ids

    def text(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The texts of several outputs, without special tokens."""
        return list(self._tokenizer.decode_batch(ids, skip_special_tokens=True))

    def marked(self, ids: Sequence[int]) -> str:
        """The text of one output with its special tokens, but for the end token behind it."""
        kept = ids[:-1] if len(ids) and ids[-1] in self.end_ids else ids
        return str(self._tokenizer.decode(list(kept), skip_special_tokens=False))

    @property
    def unread_variables(self) -> tuple[str, ...]:
        """Those of the given variables that the chat template does not read, sorted."""
        return tuple(sorted(self._variables.keys() - self._read_by_template))

    def _render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
        if self._template is None:
            raise ValueError("the model folder has no chat template, and the task's prompts are conversations")
        told = list(map(_with_mappings, messages))
        given = {"messages": told, "tools": list(tools) or None, "add_generation_prompt": True}
        try:
            text = self._template.render(**self._variables, **given, **self._special_tokens())
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"chat template: {error}") from error
        if IMAGE_AS_IT_IS in text:
            raise ValueError("chat template: it has no place for images; a vision-language model is needed")
        return text

    def _compile(self, model: Path) -> jinja2.Template | None:
        """The template, in the environment that Hugging Face's templates are written for."""
        file = model / "chat_template.jinja"
        source = file.read_text() if file.exists() else self._settings.get("chat_template")
        self._read_by_template: frozenset[str] = frozenset()
        if not isinstance(source, str):
            return None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = _to_json
        self._read_by_template = frozenset(find_undeclared_variables(environment.parse(source)))
        return environment.from_string(source)

    def _special_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token`, ... as templates name them."""
        values = {key: value for key, value in self._settings.items() if key.endswith("_token")}
        texts = {key: value["content"] if isinstance(value, dict) else value for key, value in values.items()}
        return {key: text for key, text in texts.items() if isinstance(text, str)}

    def _end_ids(self, model: Path) -> tuple[int, ...]:
        """The end tokens of config.json, generation_config.json and the tokenizer, and those that SGLang adds."""
        config = _read_json(model / "config.json")
        texts = (self._special_tokens().get("eos_token", ""), *ADDED_ENDS)
        found: list[int | None] = [self._tokenizer.token_to_id(text) for text in texts]
        for told in (config, config.get("text_config") or {}, _read_json(model / "generation_config.json")):
            ids = told.get("eos_token_id")
            found += ids if isinstance(ids, list) else [ids]
        return tuple(sorted({end for end in found if end is not None}))


def _read_json(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return content


def _with_mappings(message: Message) -> Message:
    """With the arguments of its tool calls as mappings, as templates take them; OpenAI's form has them as JSON text.

    >>> call = {"function": {"name": "add", "arguments": '{"a": 6}'}}
    >>> _with_mappings({"role": "assistant", "content": "", "tool_calls": [call]})["tool_calls"]
    [{'function': {'name': 'add', 'arguments': {'a': 6}}}]
    """
    if not isinstance(calls := message.get("tool_calls"), list):
        return message
    return {**message, "tool_calls": [_with_mapping(call) for call in calls]}


def _with_mapping(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(text)
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """`{% generation %}`: templates mark an assistant's words by it, for transformers' masks, and no word changes."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (as jinja declares it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)
