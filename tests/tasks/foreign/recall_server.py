"""An OpenEnv server, which prints its port: `recall_server.py SESSIONS [tools]`.

Two words to be repeated; or a tool that echoes.
"""

import random
import socket
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

LETTERS = "abcdefgh"


class Say(Action):
    text: str


class Shown(Observation):
    word: str


class Recall(Environment):
    """Reward: for each word the share of its letters that are right, halved."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, length=2, **_):
        self._random = random.Random(seed)
        self._length = length
        self._state = State(episode_id=episode_id, step_count=0)
        return self._next()

    def step(self, action, timeout_s=None, **_):
        said = action.text.strip()
        if "hh" in said:
            raise RuntimeError("the environment broke")
        right = sum(one == other for one, other in zip(said, self._word, strict=False))
        self._state.step_count += 1
        return self._next(right / max(len(said), self._length) / 2, self._state.step_count == 2)

    @property
    def state(self):
        return self._state

    def _next(self, reward=None, done=False):
        self._word = "".join(self._random.choice(LETTERS) for _ in range(self._length))
        return Shown(word=self._word, reward=reward, done=done)


class Echo(MCPEnvironment):
    """One tool, which gives its argument back; no reward."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("echo")

        @server.tool
        def echo(message: str) -> str:
            """Give the message back."""
            return f"echo of {message}"

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **_):
        return Observation(metadata={"message": "ready"})

    def _step_impl(self, action, timeout_s=None, **_):
        return Observation()

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    kinds = (Echo, CallToolAction, CallToolObservation) if sys.argv[2:] == ["tools"] else (Recall, Say, Shown)
    app = create_fastapi_app(*kinds, max_concurrent_envs=int(sys.argv[1]))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
