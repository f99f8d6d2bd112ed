"""RoBERTa, XLM-RoBERTa: BERT whose positions begin after the padding's. Front-safe: no torch."""

from __future__ import annotations

from runtime.checkpoint.config_keys import MAX_VOCAB
from runtime.checkpoint.json_file import Keys
from runtime.models.bert.spec import BertSpec, read_bert


def read(config: Keys, generation: Keys) -> BertSpec:
    """Read the family's `config.json`; see `read_bert`."""
    padding = config.integer("pad_token_id", MAX_VOCAB, 1, low=0)
    return read_bert(config, generation, prefix="roberta.", first_position=padding + 1)
