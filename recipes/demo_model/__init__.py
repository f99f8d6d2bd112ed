"""The demo model's recipe: generators of its text, training, evaluation, the model card.

The resulting checkpoint is `headrace/demo/model`.
"""
