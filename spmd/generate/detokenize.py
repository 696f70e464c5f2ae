"""Token ids to text, one token at a time."""

from collections.abc import Sequence

from spmd.data.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"
"""Decoded in place of an incomplete character."""
_MAX_INCOMPLETE = 3
"""Most bytes of an incomplete UTF-8 character."""


class IncrementalDetokenizer:
    """Decoder of tokens that arrive one by one after `ids`; an incomplete character is held back.

    Example:
        >>> from spmd.data.tokenizer import ByteTokenizer
        >>> detokenizer = IncrementalDetokenizer(ByteTokenizer(), [104])
        >>> [detokenizer.add(token) for token in "é!".encode()]
        ['', 'é', '!']
    """

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
        self._tokenizer, self._ids = tokenizer, list(ids)
        self._start, self._complete, self._returned = 0, len(self._ids), tokenizer.decode(self._ids)

    def add(self, token: int) -> str:
        """Return the text that one more token completes."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids[self._start :])
        incomplete = min(len(text) - len(text.rstrip(_INCOMPLETE)), _MAX_INCOMPLETE)
        # Some tokenizers decode a run of bytes all or none: an incomplete character undoes the complete one before it.
        if not text.startswith(self._returned) and len(self._ids) - self._complete <= _MAX_INCOMPLETE:
            return ""
        end = max(len(self._returned), len(text) - incomplete)
        piece, self._returned = text[len(self._returned) : end], text[:end]
        if not incomplete:  # decode only from the last complete piece: a tokenizer may need one piece of context
            self._start, self._complete = self._complete, len(self._ids)
            self._returned = self._tokenizer.decode(self._ids[self._start :])
        return piece

    def finish(self) -> str:
        """Return the text that is still held back."""
        return self._tokenizer.decode(self._ids[self._start :])[len(self._returned) :]
