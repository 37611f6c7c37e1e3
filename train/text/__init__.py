"""Text for language models: tokenizers, blocks of tokens, masked pairs of sentences."""
