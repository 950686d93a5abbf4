"""What asks the reward models of a run: a group's answers in one call, at the one with least to do.

    the process is slow, dead, full, or says nonsense ─▶ it rests for `reward_model.retry`, another one is asked
    none answers in `reward_model.patience`           ─▶ ScorerUnready: the group is masked, and counted

A process that is started again tells another address, which is read again before every call. No torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec

from streamrl.config import Config
from streamrl.observe.events import Events
from streamrl.reward_model.wire import LARGEST_REPLY, PATH, Ask, BadReply, Turn, read_address, scores_of
from streamrl.stream.keys import bearer_token, key_folder
from streamrl.tasks.environment import Prompt, message_text
from streamrl.tasks.failures import ScorerUnready
from streamrl.tasks.http_session import HttpSession

# Seconds between two looks for a process that can be asked.
POLL = 0.05


class Unanswered(ConnectionError):
    """One try that failed; the text says why in one line."""


class Silent(Unanswered):
    """It said nothing in its time."""


class RewardModels:
    """The reward models as a worker sees them. `close` it.

    Usage:
        models = RewardModels(config, run_folder, events)
        await models.scores(Prompt(index=0, text="1+1="), ["2", "3"])  # [0.7, -0.2]
    """

    def __init__(self, config: Config, run_folder: Path, events: Events) -> None:
        self._settings = config.reward_model
        self._start_timeout = config.run.start_timeout
        self._run_folder = run_folder
        self._http = HttpSession({"Authorization": f"Bearer {bearer_token(key_folder(config, run_folder), 'api')}"})
        self._events = events
        self._busy = [0] * self._settings.workers  # calls that each of them has
        self._rests = [0.0] * self._settings.workers  # until when it is not asked, on the monotonic clock

    async def ready(self) -> None:
        """Wait until one of them listens. Raises TimeoutError after `run.start_timeout`."""
        deadline = time.monotonic() + self._start_timeout
        while not any(read_address(self._run_folder, index) for index in range(self._settings.workers)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no reward model was ready in run.start_timeout={self._start_timeout:g} s")
            await asyncio.sleep(POLL)

    async def scores(self, prompt: Prompt, answers: Sequence[str]) -> list[float | str]:
        """As `Judge` has it. Raises ScorerUnready."""
        if prompt.images:
            return ["a prompt with images, and the reward model reads text"] * len(answers)
        turns = [Turn(role=each["role"], content=message_text(each)) for each in prompt.messages or ()]
        ask = Ask(answers=list(answers), text=prompt.text, messages=turns if prompt.messages is not None else None)
        body = msgspec.json.encode(ask)
        deadline, reason = time.monotonic() + self._settings.patience, None
        while (now := time.monotonic()) < deadline:
            found = self._idlest(now)
            if found is None:
                await asyncio.sleep(min(POLL, self._settings.retry))
                continue
            index, address = found
            timeout = min(self._settings.timeout, deadline - now)
            try:
                return await self._ask(index, address, body, len(answers), timeout)
            except Unanswered as failed:
                was_cut = timeout < self._settings.timeout and isinstance(failed, Silent)
                if reason is None or not was_cut:
                    reason = f"reward-model-{index}: {failed}"
                self._rests[index] = time.monotonic() + self._settings.retry
                fields = {"index": index, "task_prompt_index": prompt.index, "reason": str(failed)}
                self._events.emit("reward_model.unanswered", **fields)
        patience = f"{self._settings.patience:g} s"
        raise ScorerUnready(
            f"no reward model has answered in reward_model.patience={patience}: {reason or 'none listens'}"
        )

    async def close(self) -> None:
        """May be called twice."""
        await self._http.close()

    def _idlest(self, now: float) -> tuple[int, str] | None:
        """The one with the fewest calls of those that listen and do not rest, and its address."""
        for index in sorted(range(len(self._busy)), key=self._busy.__getitem__):
            if self._rests[index] <= now and (address := read_address(self._run_folder, index)) is not None:
                return index, address
        return None

    async def _ask(self, index: int, address: str, body: bytes, count: int, timeout: float) -> list[float | str]:
        """Raises Unanswered where another try may be better."""
        limit = aiohttp.ClientTimeout(total=timeout)
        self._busy[index] += 1
        try:
            async with self._http.session.post(
                address + PATH, data=body, timeout=limit, allow_redirects=False
            ) as reply:
                status, content = reply.status, await _read(reply.content)
            if status == 400:  # it is the answers': every process would say so
                return [content.decode(errors="replace")[:300] or "refused"] * count
            if status != 200:
                raise Unanswered(f"status {status}: {content.decode(errors='replace')[:200]}")
            return scores_of(content, count)
        except TimeoutError:
            raise Silent(f"no reply in {timeout:.3g} s (reward_model.timeout)") from None
        except (aiohttp.ClientError, OSError, BadReply) as error:
            if isinstance(error, Unanswered):
                raise
            raise Unanswered(f"{type(error).__name__}: {error}") from None
        finally:
            self._busy[index] -= 1


async def _read(content: aiohttp.StreamReader) -> bytes:
    """A body, up to LARGEST_REPLY bytes. Raises BadReply for a longer one."""
    parts, size = [], 0
    async for part in content.iter_any():
        size += len(part)
        if size > LARGEST_REPLY:
            raise BadReply(f"a reply of more than {LARGEST_REPLY} bytes")
        parts.append(part)
    return b"".join(parts)
