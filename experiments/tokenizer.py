"""Byte-level byte-pair tokenizer of the experiments: trained once, shipped as JSON.

Every text round-trips: the 256 bytes are in the vocabulary, and the end-of-sequence marker has no spelling
(a text that contains its name is encoded as ordinary characters).
"""

import os
from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

VOCABULARY = 2048
EOS_NAME = "<|endoftext|>"
SHIPPED = Path(__file__).parent / "checkpoints" / "tokenizer.json"


class Tokenizer:
    """Text to token ids and back.

    Attributes:
      vocab_size: number of token ids.
      eos: id of the end-of-sequence token; no text encodes to it.
    """

    def __init__(self, inner: _Tokenizer):
        eos = inner.token_to_id(EOS_NAME)
        if eos is None:
            raise ValueError(f"tokenizer: no token {EOS_NAME!r} in its vocabulary")
        inner.encode_special_tokens = True
        self._inner = inner
        self.eos: int = eos
        self.vocab_size: int = inner.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of one text, without an end-of-sequence token."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """As `encode`, for many texts at once."""
        return [e.ids for e in self._inner.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, tokens) -> str:
        """Text of the tokens; end-of-sequence and padding (negative ids) are left out.

        Raises:
          ValueError: an id is not in the vocabulary.
        """
        ids = [int(t) for t in tokens if int(t) >= 0]
        if any(t >= self.vocab_size for t in ids):
            raise ValueError(f"tokens: expected ids below {self.vocab_size}, got {max(ids)}")
        return self._inner.decode(ids, skip_special_tokens=True)

    def save(self, path: Path | str) -> None:
        """Writes the JSON file in one step: a reader never sees half of it."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(self._inner.to_str(), encoding="utf-8")
        os.replace(partial, path)


def train_tokenizer(texts: list[str], vocab_size: int = VOCABULARY) -> Tokenizer:
    """Trains on `texts`, to exactly `vocab_size` tokens if the texts are rich enough."""
    inner = _Tokenizer(models.BPE())
    # The usual split into words; a line break and the indentation after it form one piece.
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_NAME],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return Tokenizer(inner)


def load_tokenizer(path: Path | str = SHIPPED) -> Tokenizer:
    """Reads a tokenizer written by `Tokenizer.save`.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file is damaged or holds something else.
    """
    path = Path(path)
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return Tokenizer(_Tokenizer.from_str(text))
    except Exception as error:  # the library raises plain Exception on bad JSON
        raise ValueError(f"{path}: not a readable tokenizer file ({error})") from error
