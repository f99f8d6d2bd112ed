"""The recipe of the demo model: generators of its text, training, evaluation, the model card.

The resulting checkpoint is `headrace/demo/model`.
"""
