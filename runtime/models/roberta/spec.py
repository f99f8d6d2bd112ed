"""The `config.json` of RoBERTa and XLM-RoBERTa: BERT with shifted positions. Imports no torch.

The position of a text's first token is one more than the id of the padding token.
"""

from __future__ import annotations

from runtime.checkpoint.config_keys import MAX_VOCAB
from runtime.checkpoint.json_file import Keys
from runtime.models.bert.spec import BertSpec, read_bert


def read(config: Keys, generation: Keys) -> BertSpec:
    """Return the settings in `config.json`; errors are those of `read_bert`."""
    padding = config.integer("pad_token_id", MAX_VOCAB, 1, low=0)
    return read_bert(config, generation, prefix="roberta.", first_position=padding + 1)
