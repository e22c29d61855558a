"""Real text that every Python brings along: the topics of ``help()``."""

from __future__ import annotations

import dataclasses
import functools
import re
from pydoc_data import topics

import torch

NUM_BYTES = 256
"""How many different tokens byte-level text can have."""

STATEMENTS = ("while", "if", "for")
"""Topics that are short enough to be learned in a minute."""

_WORDS = re.compile(r" ?\w+| ?[^\w\s]+")


@dataclasses.dataclass(frozen=True)
class Batch:
    """Text and what follows each token of it; both int64, of shape ``(batch, context)``."""

    tokens: torch.Tensor
    targets: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Words and punctuation, each with the space before it; a token is the number of one."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Vocabulary:
        """All that a text is made of."""
        return cls(tuple(sorted(set(_WORDS.findall(text)))))

    def encode(self, text: str) -> torch.Tensor:
        """The tokens of a text, int64, of shape ``(tokens,)``; words must be known ones."""
        return torch.tensor([self._numbers[word] for word in _WORDS.findall(text)])

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens."""
        return "".join(self.words[token] for token in tokens)

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}


def corpus() -> torch.Tensor:
    """Python's help topics, some 450 kB, as a uint8 tensor of shape ``(bytes,)``."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)


def statements() -> str:
    """Returns Python's help on some statements, without headings and code, in one line."""
    text = "\n\n".join(topics.topics[name] for name in STATEMENTS)
    return " ".join(" ".join(filter(_is_prose, text.split("\n\n"))).split())


def _is_prose(paragraph: str) -> bool:
    return not paragraph.startswith(" ") and "***" not in paragraph


def random_batch(data: torch.Tensor, size: int, context: int, rng: torch.Generator) -> Batch:
    """A batch of ``size`` windows of ``context`` tokens, from anywhere in the text."""
    starts = torch.randint(len(data) - context, (size, 1), generator=rng)
    windows = data[starts + torch.arange(context + 1)].long()
    return Batch(windows[:, :-1], windows[:, 1:])
