"""Training data that needs no network: English text that ships with Python or a file of the user's, and
generated images."""

from __future__ import annotations

import pathlib
import urllib.error
import urllib.request

import torch
import torch.nn.functional as F

from ..errors import MinicompileError

SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
OTHERWISE = "leave --data out to train on text that ships with Python"


def load_text(source: str | None = None) -> tuple[str, str]:
    """(text, where it came from). `source`: a file's path, "shakespeare" (fetched once), or None for Python's
    own documentation topics (0.46 MB of English).

    Raises MinicompileError for a file that cannot be read or is too short to train on."""
    if source is None:
        from pydoc_data import topics
        return "\n\n".join(topics.topics[k] for k in sorted(topics.topics)), "Python's documentation topics"
    path = pathlib.Path(source)
    if source == "shakespeare":
        from ..cache import cache_dir
        path = pathlib.Path(cache_dir()) / "tinyshakespeare.txt"
        if not path.exists():
            try:
                with urllib.request.urlopen(SHAKESPEARE, timeout=20) as reply:
                    path.write_bytes(reply.read())
            except (urllib.error.URLError, OSError) as error:
                raise MinicompileError(f"Shakespeare could not be fetched ({error}). Give a text file with "
                                       f"--data FILE, or {OTHERWISE}.") from None
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise MinicompileError(f"The data file {source!r} cannot be read ({error.strerror}). "
                               f"Give an existing text file, or {OTHERWISE}.") from None
    if len(text) < 10_000:
        raise MinicompileError(f"The data file {source!r} has {len(text)} characters; "
                               "at least 10,000 are needed to train on.")
    return text, source


class TextBatches:
    """Random windows of a character sequence. `batch()` gives (tokens, targets), int64 [batch, block], the
    same sequence of batches for equal seeds. `vocab_size`: of a model with more tokens than the text has."""

    def __init__(self, text: str, batch: int, block: int, device: str, seed: int, vocab_size: int | None):
        characters = sorted(set(text))
        index = {c: i for i, c in enumerate(characters)}
        self.tokens = torch.tensor([index[c] for c in text], dtype=torch.int64)
        self.vocab_size = vocab_size or len(characters)
        self.batch_size, self.block, self.device = batch, block, device
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self):
        starts = torch.randint(len(self.tokens) - self.block, (self.batch_size,), generator=self.generator)
        windows = torch.stack([self.tokens[s:s + self.block + 1] for s in starts])
        if self.device == "cuda":
            windows = windows.pin_memory().to("cuda", non_blocking=True)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class ImageBatches:
    """Ten classes of generated images: a fixed random low-frequency pattern per class, plus noise. `batch()`
    gives (float32 [batch, 3, size, size], int64 [batch]). Eight batches are made once and cycled."""

    def __init__(self, batch: int, size: int, device: str, channels_last: bool, seed: int):
        g = torch.Generator().manual_seed(seed)
        patterns = F.interpolate(torch.randn(10, 3, 7, 7, generator=g), size=(size, size), mode="bilinear")
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.batches = []
        for _ in range(8):
            labels = torch.randint(10, (batch,), generator=g)
            images = patterns[labels] + 0.5 * torch.randn(batch, 3, size, size, generator=g)
            self.batches.append((images.to(device, memory_format=memory_format), labels.to(device)))
        self.next = 0

    def batch(self):
        self.next += 1
        return self.batches[(self.next - 1) % len(self.batches)]


class CaptionBatches:
    """Generated images with generated captions: 5 to 31 tokens (9 of 10), 33 to 63, or 65 to 255 (1 of 100), padded to
    `block`. `batch()` gives (float32 [batch, 3, size, size], int64 labels [batch, block], bool mask [batch, block]),
    where labels are -100 and the mask is False at padding."""

    def __init__(self, batch: int, size: int, block: int, vocab_size: int, device: str, seed: int):
        self.batch_size, self.size, self.block, self.vocab_size, self.device = batch, size, block, vocab_size, device
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self):
        g, count = self.generator, self.batch_size
        ranges = torch.tensor([[5, 31], [33, 63], [65, 255]])[torch.multinomial(torch.tensor([0.9, 0.09, 0.01]), count, True, generator=g)]
        lengths = ranges[:, 0] + (torch.rand(count, generator=g) * (ranges[:, 1] - ranges[:, 0] + 1)).long()
        mask = torch.arange(self.block) < lengths.clamp(max=self.block)[:, None]
        labels = torch.randint(self.vocab_size, (count, self.block), generator=g).where(mask, -100)
        images = torch.randn(count, 3, self.size, self.size, generator=g)
        return images.to(self.device), labels.to(self.device), mask.to(self.device)
