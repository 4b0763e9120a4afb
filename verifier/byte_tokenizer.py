"""A tokenizer for models that never saw text: byte b is token b, and every other id shows as its number."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

BYTES = 256
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def byte_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Text goes in as its UTF-8 bytes; id 300 comes out as "<300>". Raises ValueError below 256 ids."""
    if vocab_size < BYTES:
        raise ValueError(f"a vocabulary of {vocab_size} has no room for the {BYTES} bytes that text is made of")
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(BYTES)}  # as byte_fallback wants them to be called
    vocabulary |= {f"<{token}>": token for token in range(BYTES, vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE)
