"""A Gymnasium environment of text: two words to be repeated, one after another."""

import gymnasium
from gymnasium.spaces import Box, Text

LETTERS = "abcdefgh"


class Recall(gymnasium.Env):
    """Reward: for each word the share of its letters that are right, halved."""

    def __init__(self, length: int = 2, fails_on: str = ""):
        self.observation_space = Text(max_length=length, charset=LETTERS)
        self.action_space = Text(max_length=64)
        self._length = length
        self._fails_on = fails_on

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._left = 2
        return self._next(), {}

    def step(self, action):
        said = action.strip()
        if self._fails_on and self._fails_on in said:
            raise RuntimeError("the environment broke")
        right = sum(one == other for one, other in zip(said, self._word, strict=False))
        reward = right / max(len(said), len(self._word)) / 2
        self._left -= 1
        return self._next(), reward, self._left == 0, False, {"last": reward * 2, "word": self._word}

    def _next(self):
        self._word = "".join(LETTERS[place] for place in self.np_random.integers(0, 8, self._length))
        return self._word


class Seen(Recall):
    """One that shows a picture."""

    def __init__(self):
        super().__init__()
        self.observation_space = Box(0, 255, (4, 4))
